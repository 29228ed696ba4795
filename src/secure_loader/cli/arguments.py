"""The command line's grammar. Imports nothing of core: help is instant."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .. import __version__
from . import arguments_keys
from .grammar import (
    Parser,
    command,
    for_whom,
    force_folder,
    group,
    key_sources,
    new_keys,
    policies,
    positive,
    size,
    trusting,
    wrap,
)

if TYPE_CHECKING:
    from .grammar import Commands

_CODES = """\
exit codes:
  0 fine   1 unexpected   2 usage   3 verification failed   4 policy denied
  5 key unavailable   6 bad format   7 files   130 interrupted   141 nobody reads the output
"""


def make_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="secure-loader",
        description=wrap(
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
        arguments_keys.keygen,
        arguments_keys.trust,
        arguments_keys.recipients,
        _encrypt,
        _decrypt,
        _verify,
        _sign,
        _inspect,
        _rewrap,
        arguments_keys.publish,
        _policy,
        _bench,
        _env,
        _config,
    ):
        add(commands)
    return parser


def _encrypt(commands: Commands) -> None:
    p = command(
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
    new_keys(
        p,
        "master key: a NAME given to keygen, a kid, file:PATH or env:NAME (default: the only one there is; with -r, a new "
        "one that nobody keeps but the recipients)",
    )
    for_whom(p, "encrypt for them")
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
    p.add_argument("--chunk-size", metavar="SIZE", type=size, help="a power of two from 64KiB to 16MiB (default: 2MiB)")
    p.add_argument("--format-version", choices=("1", "2"), default="2", help="of CryptoTensors (default: %(default)s)")
    p.add_argument(
        "--keep-names",
        action="store_true",
        help="keep model.safetensors instead of model.secure.safetensors; readers that do not know encryption then "
        "load noise instead of finding nothing",
    )
    policies(p, "it loads")
    force_folder(p)


def _decrypt(commands: Commands) -> None:
    p = command(
        commands,
        "decrypt",
        "models:decrypt",
        "Turn an encrypted model folder back into a plain one; everything is verified on the way.",
        "secure-loader decrypt ./model-encrypted ./model\n"
        "secure-loader decrypt ./model-encrypted ./model --keys /run/secrets/alice.jwk",
    )
    p.add_argument("src", metavar="SRC", help="an encrypted folder")
    p.add_argument("dst", metavar="DST", help="the new folder, in clear")
    key_sources(p)
    trusting(p)
    force_folder(p)


def _verify(commands: Commands) -> None:
    p = command(
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
    trusting(p)


def _sign(commands: Commands) -> None:
    p = command(
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
    trusting(p)


def _inspect(commands: Commands) -> None:
    p = command(
        commands,
        "inspect",
        "models:inspect",
        "Show what is in a file or model folder. Needs no key, and verifies nothing.",
        "secure-loader inspect ./model-encrypted\nsecure-loader inspect ./model-encrypted --tensors | less",
    )
    p.add_argument("path", metavar="PATH", help="a file, or a model folder")
    p.add_argument("--tensors", action="store_true", help="list the tensors")


def _rewrap(commands: Commands) -> None:
    p = command(
        commands,
        "rewrap",
        "models:rewrap",
        "Put an encrypted model folder under another master key or change its recipients, and sign it again.",
        "secure-loader keygen alice-2027\nsecure-loader rewrap ./model-encrypted -k alice-2027 --release 2\n"
        "secure-loader rewrap ./model-encrypted -r carol --remove bob-id-1f3a9c02 --new-key --release 3",
        "Tensors are not encrypted again: only the keys that they are encrypted with are.",
    )
    p.add_argument("path", metavar="PATH", help="an encrypted folder; replaced when the new one is complete")
    new_keys(
        p,
        "the new master key: a NAME given to keygen, a kid, file:PATH or env:NAME (default: the only one there is; where "
        "there are recipients, the old one)",
    )
    p.add_argument("--new-key", action="store_true", help="a new master key that nobody keeps but the recipients")
    for_whom(p, "they open it from now on, besides those who do")
    p.add_argument(
        "--remove",
        metavar="KID",
        action="append",
        default=[],
        help="a recipient, as in inspect, who shall not open it any more; may be repeated",
    )
    policies(p, "the policy it has")
    p.add_argument("--release", metavar="N", type=int, help="the new release (default: as it is)")
    key_sources(p, "where the old master key is")
    trusting(p)


def _policy(commands: Commands) -> None:
    actions = group(
        commands,
        "policy",
        "lint and test a policy before it is embedded",
        "Policies say who may load a model, and are embedded by: encrypt --policy FILE.",
        "secure-loader policy lint licence.rego\nsecure-loader policy test licence.rego",
    )
    p = command(
        actions,
        "lint",
        "policy:lint",
        "Check that a policy parses, denies by default, and uses nothing that a local policy may not.",
        "secure-loader policy lint licence.rego",
    )
    p.add_argument("file", metavar="FILE", help="a policy in Rego, of at most 64 KiB")
    p = command(
        actions,
        "test",
        "policy:test",
        "Lint a policy, and see what it says in the cases that you thought of.",
        "secure-loader policy test licence.rego\nsecure-loader policy test licence.rego my.cases.json --json",
        "Cases are a JSON list of objects with name, expect (allow or deny) and input.",
    )
    p.add_argument("file", metavar="FILE", help="a policy in Rego, of at most 64 KiB")
    p.add_argument("cases", metavar="CASES", nargs="?", help="its cases (default: licence.cases.json for licence.rego)")


def _bench(commands: Commands) -> None:
    p = command(
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
    p.add_argument("--repeat", metavar="N", type=positive, default=5, help="repetitions (default: %(default)s)")
    p.add_argument("--cold", action="store_true", help="measure also with files not in the page cache")
    key_sources(p)
    trusting(p)


def _env(commands: Commands) -> None:
    command(
        commands,
        "env",
        "system:env",
        "Show versions, hooks, keys and problems of this installation.",
        "secure-loader env\nsecure-loader env --json",
    )


def _config(commands: Commands) -> None:
    actions = group(
        commands,
        "config",
        "show the settings in force",
        "Settings come from config.toml in the home folder, then the environment.",
        "secure-loader config show",
    )
    command(
        actions,
        "show",
        "system:config_show",
        "Show the settings in force, and where each comes from.",
        "secure-loader config show\nSECURE_LOADER_CONFIG=./config.toml secure-loader config show --json",
    )
