"""The command line's grammar. Imports nothing of core: help is instant."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from .. import __version__
from ..errors import ConfigError

ALGORITHMS = ("aes256gcm", "aes128gcm", "chacha20poly1305")  # a test compares them with core's
_MAX_COUNT = 1000
_SIZE = re.compile(r"(\d+)\s*(|b|k|ki|kib|m|mi|mib)", re.IGNORECASE)

_CODES = """\
exit codes:
  0 fine   1 unexpected   2 usage   3 verification failed   4 policy denied
  5 key unavailable   6 bad format   7 files   130 interrupted   141 nobody reads the output
"""


class Arguments(argparse.Namespace):
    """Parsed arguments; the attributes that every command has."""

    run: str
    json: bool = False
    quiet: bool = False
    verbose: bool = False


class _Parser(argparse.ArgumentParser):
    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """As upstream, but a closed pipe or a full disk is not passed over."""
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """A usage error, reported like every other error."""
        raise ConfigError(message, hint=f"see: {self.prog} --help")


if TYPE_CHECKING:
    from _typeshed import SupportsWrite

    _Commands = argparse._SubParsersAction[_Parser]  # noqa: SLF001 - what add_subparsers returns has no public name


def wants_json(words: Sequence[str]) -> bool:
    """Whether a command line that may not even parse asks for JSON."""
    return "--json" in words


def wants_trace(words: Sequence[str]) -> bool:
    """Whether a command line that may not even parse asks for details."""
    return any(word in ("-v", "--verbose") for word in words)


def make_parser() -> _Parser:
    """The parser of the whole command line."""
    parser = _Parser(
        prog="secure-loader",
        description=_wrap(
            "Encrypt, sign, verify and inspect model weights; load them with loader='secure' in Transformers "
            "and --load-format secure in vLLM."
        ),
        epilog="first steps:\n"
        "  secure-loader keygen alice\n"
        "  secure-loader encrypt ./model ./model-encrypted\n"
        "  secure-loader verify ./model-encrypted\n"
        "  secure-loader inspect ./model-encrypted\n\n" + _CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"secure-loader {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")
    for add in (
        _keygen,
        _trust,
        _recipients,
        _encrypt,
        _decrypt,
        _verify,
        _sign,
        _inspect,
        _rewrap,
        _publish,
        _policy,
        _bench,
        _env,
        _config,
    ):
        add(commands)
    return parser


def _command(commands: _Commands, name: str, run: str, summary: str, examples: str, about: str = "") -> _Parser:
    parser = commands.add_parser(
        name,
        help=summary[0].lower() + summary[1:].rstrip("."),
        description=_wrap(f"{summary} {about}"),
        epilog="examples:\n" + "".join(f"  {line}\n" for line in examples.splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="machine-readable: results on stdout, errors on stderr")
    loudness = group.add_mutually_exclusive_group()
    loudness.add_argument("-q", "--quiet", action="store_true", help="only errors, and results that were asked for")
    loudness.add_argument("-v", "--verbose", action="store_true", help="log messages, and tracebacks of errors")
    return parser


def _wrap(text: str) -> str:
    # The raw formatter, which the examples need, leaves this to us.
    return textwrap.fill(text, 79)


def _keygen(commands: _Commands) -> None:
    p = _command(
        commands,
        "keygen",
        "keys:keygen",
        "Make a master key and a signing key, and trust the signing key on this machine.",
        "secure-loader keygen alice\nsecure-loader keygen alice --algorithm chacha20poly1305 --model 'alice/*'",
        "The key files go to the home folder (SECURE_LOADER_HOME), readable by you alone.",
    )
    p.add_argument("name", metavar="NAME", help="letters, digits, dots, dashes and underscores; at most 64")
    p.add_argument("--algorithm", choices=ALGORITHMS, default=ALGORITHMS[0], help="AEAD (default: %(default)s)")
    _models(p, "which model ids this machine trusts the new signer with (default: every model)")
    secret = p.add_mutually_exclusive_group()
    secret.add_argument(
        "--passphrase",
        action="store_true",
        help="encrypt the file of the master key under a passphrase, which is asked for twice",
    )
    secret.add_argument(
        "--passphrase-file",
        metavar="FILE",
        help="likewise, under the passphrase in a file that only you can read, or behind fd:N",
    )
    p.add_argument(
        "--post-quantum",
        action="store_true",
        help="make a second signing key, ML-DSA-65: models are signed with both, and those who trust both demand both",
    )
    p.add_argument(
        "--force",
        action="store_true",
        help="replace the keys of that name. The old files are kept aside, where no loader looks: models encrypted "
        "with them no longer load until you put them back or rewrap",
    )


def _trust(commands: _Commands) -> None:
    parser = commands.add_parser(
        "trust",
        help="list, add, remove, export and revoke the signers that this machine trusts",
        description=_wrap("The signers that this machine trusts. Only models that one of them signed are loaded."),
        epilog="examples:\n  secure-loader trust list\n  secure-loader trust add alice.json --model 'alice/*'\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="action")
    _command(
        actions,
        "list",
        "keys:trust_list",
        "List the signers that this machine trusts.",
        "secure-loader trust list\nsecure-loader trust list --json",
    )
    p = _command(
        actions,
        "add",
        "keys:trust_add",
        "Trust a signer.",
        "secure-loader trust add alice.json\n"
        "secure-loader trust add alice.jwk --name alice --model 'alice/*' --until 2027-12-31\n"
        "ssh publisher secure-loader trust export alice | secure-loader trust add - --name alice",
        "Compare the thumbprint it prints with the one that the publisher tells you in another way.",
    )
    p.add_argument("file", metavar="FILE", help="a trust file, a public JWK, or a JWK set with one key; - reads stdin")
    p.add_argument("--name", metavar="N", help="what you call the signer (default: what FILE calls it)")
    _models(p, "which model ids the signer may sign (default: what FILE says, else every model)")
    p.add_argument("--until", metavar="DATE", help="trusted until then: 2027-12-31, or an RFC 3339 time (UTC)")
    p.add_argument("--force", action="store_true", help="replace the signer of that name")
    p = _command(
        actions,
        "remove",
        "keys:trust_remove",
        "Trust a signer no more.",
        "secure-loader trust remove alice",
    )
    p.add_argument("name", metavar="NAME", help="as in trust list")
    p = _command(
        actions,
        "export",
        "keys:trust_export",
        "Print a signer's public trust file, for those who shall trust it.",
        "secure-loader trust export alice > alice.json",
    )
    p.add_argument("name", metavar="NAME", help="as in trust list")
    p = _command(
        actions,
        "request",
        "keys:trust_request",
        "Print a request for a certificate of a signing key, for a certificate authority.",
        "secure-loader trust request alice > alice.csr\n"
        "secure-loader trust request alice --subject 'CN=Release,O=Acme' > alice.csr",
        "Readers who trust the authority need no trust file then: encrypt --certificate.",
    )
    p.add_argument("name", metavar="NAME", help="as given to keygen, or a kid")
    p.add_argument("--subject", metavar="NAMES", help="as RFC 4514 has it (default: CN=NAME)")
    p = _command(
        actions,
        "revoke",
        "keys:trust_revoke",
        "Take a signer, a release or a file no more, whoever names it.",
        "secure-loader trust revoke alice --reason stolen\n"
        "secure-loader trust revoke fzghk50fw_nvcyv3thZiUSt5powg2Xr8OiWLpHsud2Q --reason impostor\n"
        "secure-loader trust revoke --model alice/tiny --release 3 --reason withdrawn\n"
        "secure-loader trust revoke --file ./model/model.secure.safetensors --reason broken",
        "Written to trust/revoked.toml in the home folder, where it counts for every load of this user.",
    )
    p.add_argument("who", metavar="WHO", nargs="?", help="NAME of a trusted signer, or the thumbprint of any key")
    p.add_argument("--model", metavar="ID", help="a model id, exactly as it is signed")
    p.add_argument("--release", metavar="N", type=int, help="only this release of the model (default: all of them)")
    p.add_argument("--file", metavar="PATH", help="this very file: a safetensors file, or a secure_manifest.json")
    p.add_argument(
        "--digest",
        metavar="HEX",
        help="a file by its file_id, or by the SHA-256 of its header or of a manifest's payload",
    )
    p.add_argument("--reason", metavar="TEXT", required=True, help="why: shown to whoever is refused")
    p.add_argument(
        "--since", metavar="DATE", help="since when, for the record (default: now). It counts at once, for all"
    )


def _recipients(commands: _Commands) -> None:
    parser = commands.add_parser(
        "recipients",
        help="make an identity, and keep those of others to encrypt for",
        description=_wrap(
            "Identities: key pairs that models are encrypted for, by encrypt -r NAME. Who has the private half loads the model "
            "without having been given its master key."
        ),
        epilog="examples:\n  secure-loader recipients new bob\n  secure-loader recipients add bob.jwk\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="action")
    p = _command(
        actions,
        "new",
        "recipients:new",
        "Make an identity of your own, hybrid of ML-KEM-768 and X25519.",
        "secure-loader recipients new bob",
        "The private half goes to the keys folder, the public one to the recipients folder of the home folder.",
    )
    p.add_argument("name", metavar="NAME", help="letters, digits, dots, dashes and underscores; at most 64")
    p.add_argument("--force", action="store_true", help="replace the identity of that name; its files are kept aside")
    _command(
        actions,
        "list",
        "recipients:show",
        "List the public identities that this machine knows.",
        "secure-loader recipients list\nsecure-loader recipients list --json",
    )
    p = _command(
        actions,
        "add",
        "recipients:add",
        "Keep somebody's public identity, to encrypt for.",
        "secure-loader recipients add bob.jwk\n"
        "ssh bob@host secure-loader recipients export bob | secure-loader recipients add - --name bob",
        "Compare the thumbprint it prints with the one that its owner tells you in another way.",
    )
    p.add_argument("file", metavar="FILE", help="a public JWK; - reads stdin")
    p.add_argument("--name", metavar="N", help="what you call them (default: the name of FILE)")
    p.add_argument("--force", action="store_true", help="replace the one of that name")
    p = _command(
        actions,
        "remove",
        "recipients:remove",
        "Forget a public identity. Models that were encrypted for it stay so: see rewrap --remove.",
        "secure-loader recipients remove bob",
    )
    p.add_argument("name", metavar="NAME", help="as in recipients list")
    p = _command(
        actions,
        "export",
        "recipients:export",
        "Print a public identity, for those who shall encrypt for it.",
        "secure-loader recipients export bob > bob.jwk",
    )
    p.add_argument("name", metavar="NAME", help="as in recipients list")


def _encrypt(commands: _Commands) -> None:
    p = _command(
        commands,
        "encrypt",
        "models:encrypt",
        "Encrypt and sign a model folder.",
        "secure-loader encrypt ./model ./model-encrypted\n"
        "secure-loader encrypt ./model ./out -k alice --model-id alice/model --release 2\n"
        "secure-loader encrypt ./model ./out --exclude '*.bias' --exclude 'lm_head.*'\n"
        "secure-loader encrypt ./model ./out -r bob -r transit:https://vault.example:8200/transit/keys/models",
        "SRC is only read. A run that was killed is completed by the next one with the same arguments.",
    )
    p.add_argument("src", metavar="SRC", help="a folder as save_pretrained writes it")
    p.add_argument("dst", metavar="DST", help="the new folder")
    _new_keys(
        p,
        "master key: a NAME given to keygen, a kid, file:PATH or env:NAME (default: the only one there is; with -r, a new "
        "one that nobody keeps but the recipients)",
    )
    _for_whom(p, "encrypt for them")
    p.add_argument("--model-id", metavar="ID", help="what trust stores match (default: the name of SRC)")
    p.add_argument("--release", metavar="N", type=int, default=1, help="grows with every publication (default: 1)")
    p.add_argument(
        "--include",
        metavar="GLOB",
        action="append",
        default=[],
        help="encrypt only tensors that match; may be repeated (default: all)",
    )
    p.add_argument(
        "--exclude",
        metavar="GLOB",
        action="append",
        default=[],
        help="leave tensors that match in clear, signed all the same; may be repeated",
    )
    p.add_argument(
        "--chunk-size", metavar="SIZE", type=_size, help="a power of two from 64KiB to 16MiB (default: 2MiB)"
    )
    p.add_argument("--format-version", choices=("1", "2"), default="2", help="of CryptoTensors (default: %(default)s)")
    p.add_argument(
        "--keep-names",
        action="store_true",
        help="keep model.safetensors instead of model.secure.safetensors; readers that do not know encryption then "
        "load noise instead of finding nothing",
    )
    _policies(p, "it loads")
    _force_folder(p)


def _decrypt(commands: _Commands) -> None:
    p = _command(
        commands,
        "decrypt",
        "models:decrypt",
        "Turn an encrypted model folder back into a plain one; everything is verified on the way.",
        "secure-loader decrypt ./model-encrypted ./model\n"
        "secure-loader decrypt ./model-encrypted ./model --keys /run/secrets/alice.jwk",
    )
    p.add_argument("src", metavar="SRC", help="an encrypted folder")
    p.add_argument("dst", metavar="DST", help="the new folder, in clear")
    _keys(p)
    _trusting(p)
    _force_folder(p)


def _verify(commands: _Commands) -> None:
    p = _command(
        commands,
        "verify",
        "models:verify",
        "Check a file or model folder against its publisher's signature. Needs no key.",
        "secure-loader verify ./model-encrypted\nsecure-loader verify ./model-encrypted --full --trust alice.json",
    )
    p.add_argument("path", metavar="PATH", help="a file, or a model folder")
    p.add_argument("--full", action="store_true", help="also compare every stored byte with its signed digest")
    p.add_argument(
        "--oms-key",
        metavar="PEM",
        action="append",
        dest="oms_keys",
        help="demand a model.sig (OpenSSF model signing) by this public key, and no other; a file, or a folder of *.pem; may be "
        "repeated (default: one that is there is checked with those in trust/oms of the home folder)",
    )
    _trusting(p)


def _sign(commands: _Commands) -> None:
    p = _command(
        commands,
        "sign",
        "sign:sign",
        "Sign an encrypted model folder for the tools of OpenSSF model signing as well.",
        "secure-loader sign --oms ./model-encrypted --key release.pem\n"
        "secure-loader sign --oms ./model-encrypted --key release.pem --passphrase-file /run/secrets/passphrase --force",
        "Every byte of the folder is verified and hashed; the signature is model.sig in the folder.",
    )
    p.add_argument("folder", metavar="FOLDER", help="an encrypted folder")
    p.add_argument(
        "--oms",
        action="store_true",
        required=True,
        help="write model.sig, in the format of OpenSSF model signing: the only kind there is",
    )
    p.add_argument(
        "--key",
        metavar="PEM",
        required=True,
        help="file with a private EC key (P-256, P-384 or P-521) that only you can read; "
        "openssl ecparam -name prime256v1 -genkey -noout makes one",
    )
    p.add_argument(
        "--passphrase-file",
        metavar="FILE",
        help="the key's passphrase, in a file that only you can read, or behind fd:N",
    )
    p.add_argument("--force", action="store_true", help="replace a model.sig")
    _trusting(p)


def _inspect(commands: _Commands) -> None:
    p = _command(
        commands,
        "inspect",
        "models:inspect",
        "Show what is in a file or model folder. Needs no key, and verifies nothing.",
        "secure-loader inspect ./model-encrypted\nsecure-loader inspect ./model-encrypted --tensors | less",
    )
    p.add_argument("path", metavar="PATH", help="a file, or a model folder")
    p.add_argument("--tensors", action="store_true", help="list the tensors")


def _rewrap(commands: _Commands) -> None:
    p = _command(
        commands,
        "rewrap",
        "models:rewrap",
        "Put an encrypted model folder under another master key or change its recipients, and sign it again.",
        "secure-loader keygen alice-2027\nsecure-loader rewrap ./model-encrypted -k alice-2027 --release 2\n"
        "secure-loader rewrap ./model-encrypted -r carol --remove bob-id-1f3a9c02 --new-key --release 3",
        "Tensors are not encrypted again: only the keys that they are encrypted with are.",
    )
    p.add_argument("path", metavar="PATH", help="an encrypted folder; replaced when the new one is complete")
    _new_keys(
        p,
        "the new master key: a NAME given to keygen, a kid, file:PATH or env:NAME (default: the only one there is; where "
        "there are recipients, the old one)",
    )
    p.add_argument("--new-key", action="store_true", help="a new master key that nobody keeps but the recipients")
    _for_whom(p, "they open it from now on, besides those who do")
    p.add_argument(
        "--remove",
        metavar="KID",
        action="append",
        default=[],
        help="a recipient, as in inspect, who shall not open it any more; may be repeated",
    )
    _policies(p, "the policy it has")
    p.add_argument("--release", metavar="N", type=int, help="the new release (default: as it is)")
    _keys(p, "where the old master key is")
    _trusting(p)


def _policy(commands: _Commands) -> None:
    parser = commands.add_parser(
        "policy",
        help="lint and test a policy before it is embedded",
        description=_wrap("Policies say who may load a model, and are embedded by: encrypt --policy FILE."),
        epilog="examples:\n  secure-loader policy lint licence.rego\n  secure-loader policy test licence.rego\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="action")
    p = _command(
        actions,
        "lint",
        "policy:lint",
        "Check that a policy parses, denies by default, and uses nothing that a local policy may not.",
        "secure-loader policy lint licence.rego",
    )
    p.add_argument("file", metavar="FILE", help="a policy in Rego, of at most 64 KiB")
    p = _command(
        actions,
        "test",
        "policy:test",
        "Lint a policy, and see what it says in the cases that you thought of.",
        "secure-loader policy test licence.rego\nsecure-loader policy test licence.rego my.cases.json --json",
        "Cases are a JSON list of objects with name, expect (allow or deny) and input.",
    )
    p.add_argument("file", metavar="FILE", help="a policy in Rego, of at most 64 KiB")
    p.add_argument("cases", metavar="CASES", nargs="?", help="its cases (default: licence.cases.json for licence.rego)")


def _publish(commands: _Commands) -> None:
    p = _command(
        commands,
        "publish",
        "broker:publish_key",
        "Put a master key into a Trustee key broker, and the policy that says who is given it.",
        "secure-loader publish kbs://kbs.example.com:8080/models/key/alice -k alice --admin-key admin.pem\n"
        "secure-loader publish kbs:///models/key/alice --policy trustee.rego --admin-token-file token",
        "For administrators of the broker. Those who load name the same reference.",
    )
    p.add_argument(
        "reference",
        metavar="REF",
        help="kbs://HOST:PORT/REPOSITORY/TYPE/TAG, or kbs:///REPOSITORY/TYPE/TAG for the broker of the settings",
    )
    p.add_argument(
        "-k", "--key", metavar="NAME", help="a NAME given to keygen, or a kid (default: the only one there is)"
    )
    policy = p.add_mutually_exclusive_group()
    policy.add_argument(
        "--policy",
        metavar="FILE",
        help="resource policy in Rego, which replaces the broker's for all its resources (default: it stays as it is)",
    )
    policy.add_argument(
        "--policy-of",
        metavar="MODEL",
        help="likewise, the one that an encrypted model carries for brokers (encrypt --remote-policy); the model is verified",
    )
    who = p.add_mutually_exclusive_group(required=True)
    who.add_argument(
        "--admin-key", metavar="PEM", help="the administrator's Ed25519 key, in a file that only you can read"
    )
    who.add_argument("--admin-token-file", metavar="FILE", help="a token of an administrator, in such a file")
    p.add_argument(
        "--role", default="admin", help="with --admin-key: the role that the token claims (default: %(default)s)"
    )
    _trusting(p)


def _bench(commands: _Commands) -> None:
    p = _command(
        commands,
        "bench",
        "bench:bench",
        "Measure how fast a model loads on this machine, and what keeps it from loading faster.",
        "secure-loader bench ./model-encrypted\n"
        "secure-loader bench ./model-encrypted --plain ./model --cold\n"
        "secure-loader bench ./model --work /scratch --json > bench.json",
        "A plain model is encrypted first, with throw-away keys, into a temporary folder that is removed afterwards.",
    )
    p.add_argument("model", metavar="MODEL", help="a model folder or safetensors file, encrypted or plain")
    p.add_argument(
        "--plain",
        metavar="PATH",
        help="what MODEL was encrypted from: compare with loading that, by safetensors, and by cryptotensors if installed",
    )
    p.add_argument("--work", metavar="DIR", help="where to put temporary copies (default: the folder that MODEL is in)")
    p.add_argument("--repeat", metavar="N", type=_positive, default=5, help="repetitions (default: %(default)s)")
    p.add_argument("--cold", action="store_true", help="measure also with files not in the page cache")
    _keys(p)
    _trusting(p)


def _env(commands: _Commands) -> None:
    _command(
        commands,
        "env",
        "system:env",
        "Show versions, hooks, keys and problems of this installation.",
        "secure-loader env\nsecure-loader env --json",
    )


def _config(commands: _Commands) -> None:
    parser = commands.add_parser(
        "config",
        help="show the settings in force",
        description="Settings come from config.toml in the home folder, then the environment.",
        epilog="examples:\n  secure-loader config show\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="action")
    _command(
        actions,
        "show",
        "system:config_show",
        "Show the settings in force, and where each comes from.",
        "secure-loader config show\nSECURE_LOADER_CONFIG=./config.toml secure-loader config show --json",
    )


def _models(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--model", metavar="PATTERN", action="append", dest="models", help=f"{text}; may be repeated")


def _policies(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--policy",
        metavar="FILE",
        help="embed the Rego policy of FILE, which decides on the user's machine whether the model loads; it is linted, and "
        f"tested with the cases beside it (default: {default})",
    )
    parser.add_argument(
        "--remote-policy", metavar="FILE", help="carry the Rego policy of FILE for the key broker, who enforces it"
    )


def _for_whom(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "-r",
        "--recipient",
        metavar="WHO",
        action="append",
        default=[],
        dest="recipients",
        help=f"{text}: a NAME as in recipients list, the path of a public identity, or the key of a service, SCHEME:WHERE "
        "(docs/keys.md); may be repeated",
    )


def _new_keys(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("-k", "--key", metavar="NAME", help=text)
    parser.add_argument(
        "--signing-key", metavar="NAME", help="signing key, likewise (default: the one made with --key)"
    )
    parser.add_argument(
        "--certificate",
        metavar="FILE",
        help="put these certificates of the signing key into what is signed, for readers who trust their root: PEM, "
        "the key's own first",
    )


def _keys(parser: argparse.ArgumentParser, text: str = "where the master key is") -> None:
    parser.add_argument(
        "--keys",
        metavar="REF",
        action="append",
        help=f"{text}: a path, or SCHEME:WHERE (docs/keys.md), never the key itself; may be repeated (default: SECURE_LOADER_KEYS "
        "and the home folder)",
    )


def _trusting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        metavar="PATH",
        action="append",
        help="trust the signers of this file or folder, and no others; may be repeated (default: the home folder's)",
    )


def _force_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="replace the model folder at DST")


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MAX_COUNT}")
    return int(text)


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 2MiB or 65536")
    factor = {"": 1, "b": 1, "k": 1024, "m": 1024 * 1024}[found[2][:1].lower()]
    return int(found[1]) * factor
