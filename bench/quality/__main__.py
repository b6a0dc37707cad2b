"""``measure`` writes trials as JSON lines; ``collect`` sums them into results.jsonl; ``page`` makes tables and plots.

python -m bench.quality measure                                  # SmolLM2, all worlds: an hour of one core
python -m bench.quality measure --model DIR --name NAME --matrix check --worlds trio assembly
python -m bench.quality collect && python -m bench.quality page
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch

from bench.quality import plot
from bench.quality import tables as made
from bench.quality.matrix import JUDGED, MATRICES
from bench.quality.results import Cell, distinct, load_trials, read, write
from bench.quality.scenes import SCENES
from bench.quality.trial import Laboratory
from bench.quality.worlds import build_world, load_model
from kvservice.client.demo.model import smollm2

HERE: Final = Path(__file__).parent
OUTPUT: Final = Path("build/bench/quality")
RESULTS: Final = "results.jsonl"
SMALL: Final = "SmolLM2-135M-Instruct"
LARGER: Final = "Qwen2.5-Coder-0.5B-Instruct"
PLOTS: Final = {SMALL: "quality.svg"}
SAME, LEFT_OUT, ROTATED, SHUFFLED, PRODUCERS = (
    "same, from a member",
    "one left out, from a member",
    "rotated, from a member",
    "shuffled, from a member",
    "same, from producers",
)


def measure(options: argparse.Namespace) -> None:
    """Run a matrix in some worlds; every trial is written as soon as it is known."""
    folder = options.model or smollm2(options.cache)
    model = load_model(options.name if options.model else SMALL, folder)
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.worlds:
        path = options.output / f"{model.name}-{options.matrix}-{name}.jsonl"
        with path.open("w") as file:
            world = build_world(model, SCENES[name])
            with Laboratory(model, world, readers=options.readers, judged=JUDGED) as laboratory:
                for trial in laboratory.run(MATRICES[options.matrix]):
                    file.write(json.dumps(asdict(trial)) + "\n")
                    file.flush()
        print(f"{path}: done", flush=True)


def collect(output: Path) -> None:
    """Sum what was measured into the file that the page is made of. Models that were not measured now stay in it."""
    cells = [
        Cell.of(path.stem.rsplit("-", 2)[0], trial)
        for path in sorted(output.glob("*.jsonl"))
        for trial in load_trials(path)
    ]
    models, path = {one.model for one in cells}, HERE / RESULTS
    others = [one for one in read(path) if one.model not in models] if path.exists() else []
    write(path, [*distinct(cells), *others])


def tables(cells: Sequence[Cell]) -> dict[str, str]:
    """All tables of the page by their marks."""
    every = ("none", "hkvd:0.02", "hkvd:0.02@4", "head:4", "hkvd:0.05", "hkvd:0.05@4", "mixed:0.01:4", "mixed:0.01:4@4")
    return {
        "arrangements": made.arrangements(cells, SMALL, ("hkvd:0.02", "hkvd:0.05", "hkvd:0.15", "hkvd:0.15@4")),
        "same": made.methods(cells, SMALL, SAME),
        "left-out": made.methods(cells, SMALL, LEFT_OUT),
        "rotated": made.methods(cells, SMALL, ROTATED),
        "shuffled": made.methods(cells, SMALL, SHUFFLED),
        "producers": made.methods(cells, SMALL, PRODUCERS),
        "worlds": made.worlds(cells, SMALL, SAME, every),
        "predictors": made.predictors(cells, SMALL, "none"),
        "judges": made.judges(cells, SMALL),
        "larger": made.arrangements(
            cells, LARGER, ("hkvd:0.02", "hkvd:0.02@4", "head:4", "hkvd:0.05", "hkvd:0.15", "hkvd:0.15@4")
        ),
        "larger-judges": made.judges(cells, LARGER),
    }


def write_page() -> None:
    """Tables and plots of the results that lie here."""
    cells = read(HERE / RESULTS)
    made.fill(HERE / "README.md", tables(cells))
    for model, name in PLOTS.items():
        (HERE / name).write_text(plot.draw(cells, model))


def main() -> None:
    """One of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where trials are written")
    tasks = parser.add_subparsers(dest="task", required=True)
    tasks.add_parser("collect")
    tasks.add_parser("page")
    one = tasks.add_parser("measure")
    one.add_argument("--model", type=Path, help="a Hugging Face directory, Llama or Qwen2 family; left out: SmolLM2")
    one.add_argument("--name", default="model", help="what the page calls it")
    one.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "kvservice" / "models")
    one.add_argument("--matrix", choices=sorted(MATRICES), default="sweep")
    one.add_argument("--readers", type=int, default=2, help="agents of each world that reuse")
    one.add_argument("--worlds", nargs="+", choices=sorted(SCENES), default=sorted(SCENES))
    options = parser.parse_args()
    if options.task == "measure":
        torch.set_num_threads(1)
        with torch.inference_mode():
            measure(options)
    elif options.task == "collect":
        collect(options.output)
    else:
        write_page()


if __name__ == "__main__":
    main()
