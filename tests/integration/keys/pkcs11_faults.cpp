// SoftHSM with faults: every call goes on to the real module, but for those that FAULT names. Logins are counted in LOGINS.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <unistd.h>

using Word = unsigned long;
using Function = Word (*)();

struct List {
    unsigned char version[2];
    Function functions[68];
};

static List list;
static List *real;

static bool fault(const char *name) {
    const char *wanted = std::getenv("FAULT");
    return wanted && !std::strcmp(wanted, name);
}

template <typename F> static F original(int place) { return reinterpret_cast<F>(real->functions[place]); }

static void copy_environment() {
    extern char **environ;
    FILE *file = std::fopen(std::getenv("LOGINS"), "w");
    for (char **entry = environ; *entry; ++entry) std::fprintf(file, "%s\n", *entry);
    std::fclose(file);
}

static Word initialize(void *arguments) {
    std::puts("a module that talks");
    std::fflush(stdout);
    if (fault("hang")) {
        signal(SIGALRM, SIG_IGN);
        for (;;) pause();
    }
    if (fault("crash")) std::abort();
    if (fault("exit")) _exit(0);
    if (fault("copy environment")) copy_environment();
    return original<Word (*)(void *)>(0)(arguments);
}

static Word finalize(void *arguments) {
    if (fault("never ends"))
        for (;;) pause();
    return original<Word (*)(void *)>(1)(arguments);
}

static Word token_info(Word slot, void *info) {
    Word code = original<Word (*)(Word, void *)>(6)(slot, info);
    Word *flags = reinterpret_cast<Word *>(static_cast<char *>(info) + 96);
    if (fault("final try")) *flags |= 0x20000;
    if (fault("locked")) *flags |= 0x40000;
    return code;
}

static Word login(Word session, Word user, const char *pin, Word length) {
    if (const char *path = std::getenv("LOGINS"))
        if (FILE *file = std::fopen(path, "a")) {
            std::fputs("login\n", file);
            std::fclose(file);
        }
    if (fault("removed")) return 0x32;
    return original<Word (*)(Word, Word, const char *, Word)>(18)(session, user, pin, length);
}

static Word encrypt_init(Word session, Word *mechanism, Word key) {
    if (fault("no gcm")) return 0x70;
    // As a token does that takes no nonces from outside: one of its own.
    if (fault("own nonce")) std::memset(reinterpret_cast<void **>(mechanism[1])[0], 7, 12);
    return original<Word (*)(Word, Word *, Word)>(29)(session, mechanism, key);
}

static Word decrypt(Word session, void *data, Word length, unsigned char *out, Word *size) {
    Word code = original<Word (*)(Word, void *, Word, unsigned char *, Word *)>(34)(session, data, length, out, size);
    if (fault("short") && !code) *size = 5;
    return code;
}

extern "C" Word C_GetFunctionList(List **found) {
    void *library = dlopen(std::getenv("SOFTHSM"), RTLD_NOW);
    if (!library) return 5;
    reinterpret_cast<Word (*)(List **)>(dlsym(library, "C_GetFunctionList"))(&real);
    list = *real;
    list.functions[0] = reinterpret_cast<Function>(initialize);
    list.functions[1] = reinterpret_cast<Function>(finalize);
    list.functions[6] = reinterpret_cast<Function>(token_info);
    list.functions[18] = reinterpret_cast<Function>(login);
    list.functions[29] = reinterpret_cast<Function>(encrypt_init);
    list.functions[34] = reinterpret_cast<Function>(decrypt);
    *found = &list;
    return 0;
}
