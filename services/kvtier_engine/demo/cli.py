"""`kvtier demo`: run, report, draw."""

import datetime
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.options import Json, Plot, print_json, telling_in_json
from kvtier.errors import KvtierError
from kvtier.system.machine import commit, hardware
from kvtier.system.working_folder import working_folder
from kvtier_engine.demo.demo_model import demo_model_path


@telling_in_json
def demo(
    json: Json = False,
    plot: Plot = None,
    model: Annotated[Path | None, typer.Option(help="Model folder or GGUF file; default: SmolLM2-135M.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything: a third of the time.")] = False,
) -> None:
    """The whole story in three minutes: engines share a KV cache, pools stop and die, tenants stay apart.

    Everything is real: a cache pool, engines on the CPU, and a Redis where one is installed, in processes of their own
    that have ended when this ends. Progress is on standard error. Exit code 1 when something is not as it must be.

    Example: kvtier demo --plot demo.svg --json > demo.json
    """
    # Not before it is called: a list of commands needs no model.
    from kvtier.config import parse_config
    from kvtier_engine.demo.picture import draw_story
    from kvtier_engine.demo.report import figures, problems, report
    from kvtier_engine.demo.stage import Stage
    from kvtier_engine.demo.story import FULL, QUICK, tell
    from kvtier_engine.model.model_folder import DEFAULT_CACHE_DIR, open_model

    begin = time.monotonic()

    def note(text: str) -> None:
        print(f"{time.monotonic() - begin:4.0f} s  {text}", file=sys.stderr, flush=True)

    path = model or demo_model_path()
    with working_folder("kvtier-demo-") as folder:
        stage = Stage.prepare(folder, path, "bfloat16")
        note("The model is opened; the first time, it is unpacked")
        cache_dir = parse_config({}, source="demo").engine.model_cache_dir or DEFAULT_CACHE_DIR
        opened = open_model(path, cache_dir)
        story = tell(stage, opened.config, QUICK if quick else FULL, note)
    took_s = time.monotonic() - begin
    note("Done")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    caption = f"{opened.name}, {hardware()}; commit {commit()}, {today}"
    out = sys.stderr if json else sys.stdout
    print(report(story, f"{took_s:.0f} s in all. {caption}"), file=out)
    if json:
        print_json({"hardware": hardware(), "commit": commit(), "date": today, "seconds": took_s, **figures(story)})
    if plot is not None:
        draw_story(plot, story, caption)
    if found := problems(story):
        raise KvtierError(f"the demo failed: {'; '.join(found)}")
