"""`engine_driver.py` in a process of its own: `engine_child.py ANSWERS`, started by `engine_lab` alone.

Processes that its engines start import this too, as multiprocessing does: with a garbage collector that never looks at
what is imported. It would again and again during the imports, and seven times more for each engine, when vLLM asks it
to: longer than all else takes at an engine's start and end.
"""

import gc
from unittest import mock

gc.disable()
import engine_driver  # noqa: E402
from model_classes import found_out_here  # noqa: E402

gc.freeze()
# When an engine ends, vLLM thaws whatever is frozen.
mock.patch.multiple(gc, freeze=lambda: None, unfreeze=lambda: None).start()
gc.enable()

if __name__ == "__main__":
    with found_out_here():
        engine_driver.main()
