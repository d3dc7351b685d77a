"""`kvtier bench tracing`: what spans cost a lookup in a pool, and what it costs that there could be some."""

from contextlib import ExitStack

from kvtier.cli.options import Json, Plot
from kvtier.protocol.block import trace_field
from kvtier.system.tracing import NO_CONTEXT, tracing
from kvtier.system.working_folder import working_folder
from kvtier.tiers.common.traced import Traced
from kvtier_bench.measuring.blocks import keys_of, repeated
from kvtier_bench.measuring.options import Rounds
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import NUM_ROUNDS, Subject, in_turn
from kvtier_bench.processes.pool_process import pool_process

_NUM_KEYS, _CALLS, _HOOKS = 64, 500, 1000
_DEAD = "http://127.0.0.1:1"
_CONTEXT = f"00-{7:032x}-{9:016x}-01"


def bench_tracing(json: Json = False, plot: Plot = None, rounds: Rounds = NUM_ROUNDS) -> None:
    """Look up 64 keys in a pool over its Unix socket: untraced, and traced in both processes.

    Also the hooks that a load passes where tracing is off, a thousand times. Spans are thrown away in this process, and
    go to a collector that is not there in the pool's.
    """
    keys = keys_of(_NUM_KEYS, "tracing")
    with working_folder() as folder, ExitStack() as stack:
        pool = stack.enter_context(pool_process(folder, 64 << 20, [f'[tracing]\nendpoint = "{_DEAD}"']))
        tier = pool.tier("unix", stack)
        traced = Traced(tier)

        def look_up_within_a_trace() -> None:
            with tracing.within(_CONTEXT):
                traced.lookup(keys)

        pids = (pool.pid,)
        subjects = {
            "hooks, off": Subject(repeated(_pass_hooks, 5)),
            "untraced": Subject(repeated(lambda: tier.lookup(keys), _CALLS), prepare=tracing.stop, pids=pids),
            "traced": Subject(repeated(look_up_within_a_trace, _CALLS), prepare=_start, pids=pids),
        }
        samples = in_turn(subjects, rounds=rounds, label="tracing")
        tracing.stop()
    cases = [Case.of("hooks, off", "load", samples["hooks, off"], batch=_HOOKS, unit="1,000 loads")]
    cases += [
        Case.of(name, "lookup", samples[name], floor=("untraced", samples["untraced"]), batch=_NUM_KEYS)
        for name in ("untraced", "traced")
    ]
    report("Tracing", cases, as_json=json, plot=plot)


def _start() -> None:
    tracing.start(lambda span: None, sample_ratio=1.0, names_tenants=False)


def _pass_hooks() -> None:
    for _ in range(_HOOKS):
        with tracing.within(NO_CONTEXT), tracing.span("read pool"):
            trace_field()
        with tracing.span("copy to device"):
            pass
