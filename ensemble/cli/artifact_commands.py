"""Commands that export a run as an artifact and predict with it."""

from __future__ import annotations

import argparse
from pathlib import Path

from ensemble.cli.arguments import Command, count, path, words
from ensemble.cli.console import print_lines, write_json


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ensemble export`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=path)
    parser.add_argument("out", metavar="OUT", type=path, help="the folder, a new one")
    text = "export without stages: the program takes prepared samples (default: it does the last stages itself)"
    parser.add_argument("--without-preprocessing", action="store_true", help=text)
    text = "leave out uncertainty.pt2, which is as large as model.pt2"
    parser.add_argument("--without-uncertainty", action="store_true", help=text)
    text = "names of the classes or labels, separated by commas (default: those that the data name)"
    parser.add_argument("--classes", type=words, metavar="NAMES", help=text)


def export(options: argparse.Namespace) -> int:
    """Export the combined model of a run."""
    from ensemble.artifact import export as export_run

    folder = export_run(
        options.run_dir,
        options.out,
        preprocessing=not options.without_preprocessing,
        uncertainty=not options.without_uncertainty,
        classes=options.classes,
    )
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    width = max(map(len, sizes))
    print_lines(options, str(folder), *(f"  {name:<{width}}  {size:>13,} bytes" for name, size in sizes.items()))
    write_json(options, [{"file": str(folder / name), "bytes": size} for name, size in sizes.items()])
    return 0


def add_predict_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ensemble predict`."""
    text = "an artifact or a run directory"
    parser.add_argument("model", metavar="ARTIFACT_OR_RUN", type=path, help=text)
    text = "Parquet, tar, npz, npy or CSV, a folder of the first two, or a folder of images"
    parser.add_argument("data", metavar="DATA", nargs="?", type=path, help=text)
    parser.add_argument(
        "--out", required=True, metavar="FILE", type=path, help="the file of predictions: .parquet, .csv or .jsonl"
    )
    text = "names of fields of the data, separated by commas, that are written with the predictions, such as an id"
    parser.add_argument("--keep", type=words, metavar="NAMES", default=(), help=text)
    parser.add_argument(
        "--split",
        choices=("valid", "test"),
        help="with a run: predict for this split of its data instead of DATA",
    )
    text = "add uncertainties (total, aleatoric, epistemic, disagreement) and conformal predictions"
    parser.add_argument("--uncertainty", action="store_true", help=text)
    text = "with an artifact: DATA are prepared already, as its program takes them"
    parser.add_argument("--prepared", action="store_true", help=text)
    parser.add_argument("--batch-size", type=count, default=256, help="default: %(default)s")
    parser.add_argument("--device", help="device of torch, such as cpu (default: a GPU where there is one)")


def predict(options: argparse.Namespace) -> int:
    """Predict for a data set."""
    from ensemble.artifact import predict as predict_all

    rows = predict_all(
        options.model,
        options.data,
        options.out,
        split=options.split,
        keep=options.keep,
        uncertainty=options.uncertainty,
        prepared=options.prepared,
        batch_size=options.batch_size,
        device=options.device,
    )
    out = str(Path(options.out).absolute())
    print_lines(options, f"{out}: {rows:,} rows")
    write_json(options, [{"out": out, "rows": rows}])
    return 0


EXPORT = Command(
    export,
    "Export the combined, calibrated model of a run as a folder that predicts with torch alone.",
    add_export_options,
)
PREDICT = Command(
    predict,
    "Predict with an artifact or a run for all records of a data set, to a Parquet file.",
    add_predict_options,
)
