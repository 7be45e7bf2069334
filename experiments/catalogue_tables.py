"""The tables and pictures of docs/results.md and docs/front.md.

python -m experiments.catalogue_tables [--out docs]    prints the tables; with --out it writes the pictures there
python -m experiments.catalogue_tables --front RUN          prints the front that a run chooses, as front.toml has it

It reads the records of `python -m experiments.catalogue`, of `experiments.equal_bytes` (`results/readme.smollm2.json`),
and of a closed study of budgets over heads and layers (`results/divisions.*.json`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from docs.generate.catalogue import (
    CHOSEN,
    FRONT_SIZE,
    best_tables,
    choose_front,
    chosen_table,
    draw_picture,
    forms_page,
    front_tables,
    read_results,
    summary,
)
from docs.generate.divisions import divisions_table
from docs.generate.equal_bytes import Result
from experiments.bench.measuring import output_folder
from experiments.catalogue import FORMS, FRONT
from experiments.papers.common import run_script
from kvjax import KvjaxError


def front_toml(name: str, result: Result) -> str:
    """The front that a run chooses, as families of methods such as those of equal_bytes.toml."""
    family = {point["settings"]: point["family"] for point in result.points()}
    families: dict[str, list[str]] = {}
    for line in choose_front([result]):
        families.setdefault(family[line], []).append(line)
    lines = [
        f"# The {sum(FRONT_SIZE)} lines of equal_bytes.toml that all models are asked about, "
        "by the rule of `choose_front`:",
        f"# python -m experiments.catalogue_tables --front {name} > experiments/front.toml",
        f"# It chose by its contexts: {result.counts()}.",
    ]
    for title, methods in families.items():
        lines += ["", "[[family]]", f'name = "{title}"', "methods = [", *(f'    "{m}",' for m in methods), "]"]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=output_folder, help="writes the pictures here")
    p.add_argument("--front", metavar="RUN", help="prints the front that this run of catalogue.toml chooses")
    args = p.parse_args(argv)
    if args.front is not None:
        results = read_results()
        if args.front not in results:
            names = ", ".join(results) or "none"
            raise KvjaxError(f"{args.front!r} is no run at equal bytes with records; there are: {names}")
        print(front_toml(args.front, results[args.front]), end="")
        return
    print(f"## {CHOSEN.stem}\n\n{chosen_table()}\n")
    results = read_results()
    for name, result in results.items():
        print(f"## {name}\n\n{summary(result)}")
        if args.out is not None:
            (args.out / f"catalogue.{name}.png").write_bytes(draw_picture(result))
    print(f"## Divisions of a budget\n\n{divisions_table()}\n")
    fronts = list(read_results(FRONT).values())
    print(f"## The front\n\n{best_tables(fronts)}")
    for result in fronts:
        print(f"\n{front_tables(result)}")
    for name, result in read_results(FORMS).items():
        print(f"\n{forms_page(name, result)}")


if __name__ == "__main__":
    run_script(main)
