"""Converts a backbone, e.g. a GGUF file, to a folder that transformers can load."""

from collections.abc import Sequence

from jaxprompt.cli import log
from jaxprompt.cli.options import Parser, path, require_flags


def main(argv: Sequence[str]) -> int:
    """Reads the weights of --backbone and writes --output; prints a summary."""
    parser = Parser(__name__, __doc__, config=False)
    parser.add_argument(
        "--backbone", type=path, help="a folder, a hub id, a .gguf file or pkg:PACKAGE/FOLDER"
    )
    parser.add_argument("--revision", default="", help="revision of a hub id")
    parser.add_argument("--output", type=path, help="output folder")
    parser.add_argument("--dtype", default="float32", help="float32 | bfloat16")
    args, _ = parser.read(argv)
    require_flags(args, "backbone", "output")
    # Imported here, so that --help and a bad flag answer at once.
    from jaxprompt.build.conversion import convert_backbone

    report = convert_backbone(args.backbone, args.output, revision=args.revision, dtype=args.dtype)
    unused = f", without {', '.join(report.unused)}" if report.unused else ""
    log(f"{args.output}: {report.bytes:,} bytes of weights {report.fingerprint[:12]}{unused}")
    return 0
