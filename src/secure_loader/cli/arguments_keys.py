"""Grammar of the commands about keys and whom to trust."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .grammar import command, group, models, trusting

if TYPE_CHECKING:
    from .grammar import Commands

ALGORITHMS = ("aes256gcm", "aes128gcm", "chacha20poly1305")  # a test compares them with core's


def keygen(commands: Commands) -> None:
    p = command(
        commands,
        "keygen",
        "keys:keygen",
        "Make a master key and a signing key, and trust the signing key on this machine.",
        "secure-loader keygen alice\nsecure-loader keygen alice --algorithm chacha20poly1305 --model 'alice/*'",
        "The key files go to the home folder (SECURE_LOADER_HOME), readable by you alone.",
    )
    p.add_argument("name", metavar="NAME", help="letters, digits, dots, dashes and underscores; at most 64")
    p.add_argument("--algorithm", choices=ALGORITHMS, default=ALGORITHMS[0], help="AEAD (default: %(default)s)")
    models(p, "which model ids this machine trusts the new signer with (default: every model)")
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


def trust(commands: Commands) -> None:
    actions = group(
        commands,
        "trust",
        "list, add, remove, export and revoke the signers that this machine trusts",
        "The signers that this machine trusts. Only models that one of them signed are loaded.",
        "secure-loader trust list\nsecure-loader trust add alice.json --model 'alice/*'",
    )
    command(
        actions,
        "list",
        "keys:trust_list",
        "List the signers that this machine trusts.",
        "secure-loader trust list\nsecure-loader trust list --json",
    )
    p = command(
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
    models(p, "which model ids the signer may sign (default: what FILE says, else every model)")
    p.add_argument("--until", metavar="DATE", help="trusted until then: 2027-12-31, or an RFC 3339 time (UTC)")
    p.add_argument("--force", action="store_true", help="replace the signer of that name")
    p = command(
        actions,
        "remove",
        "keys:trust_remove",
        "Trust a signer no more.",
        "secure-loader trust remove alice",
    )
    p.add_argument("name", metavar="NAME", help="as in trust list")
    p = command(
        actions,
        "export",
        "keys:trust_export",
        "Print a signer's public trust file, for those who shall trust it.",
        "secure-loader trust export alice > alice.json",
    )
    p.add_argument("name", metavar="NAME", help="as in trust list")
    p = command(
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
    p = command(
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


def recipients(commands: Commands) -> None:
    actions = group(
        commands,
        "recipients",
        "make an identity, and keep those of others to encrypt for",
        "Identities: key pairs that models are encrypted for, by encrypt -r NAME. Who has the private half loads the model "
        "without having been given its master key.",
        "secure-loader recipients new bob\nsecure-loader recipients add bob.jwk",
    )
    p = command(
        actions,
        "new",
        "recipients:new",
        "Make an identity of your own, hybrid of ML-KEM-768 and X25519.",
        "secure-loader recipients new bob",
        "The private half goes to the keys folder, the public one to the recipients folder of the home folder.",
    )
    p.add_argument("name", metavar="NAME", help="letters, digits, dots, dashes and underscores; at most 64")
    p.add_argument("--force", action="store_true", help="replace the identity of that name; its files are kept aside")
    command(
        actions,
        "list",
        "recipients:show",
        "List the public identities that this machine knows.",
        "secure-loader recipients list\nsecure-loader recipients list --json",
    )
    p = command(
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
    p = command(
        actions,
        "remove",
        "recipients:remove",
        "Forget a public identity. Models that were encrypted for it stay so: see rewrap --remove.",
        "secure-loader recipients remove bob",
    )
    p.add_argument("name", metavar="NAME", help="as in recipients list")
    p = command(
        actions,
        "export",
        "recipients:export",
        "Print a public identity, for those who shall encrypt for it.",
        "secure-loader recipients export bob > bob.jwk",
    )
    p.add_argument("name", metavar="NAME", help="as in recipients list")


def publish(commands: Commands) -> None:
    p = command(
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
    trusting(p)
