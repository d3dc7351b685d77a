"""The parts of a run, a module each."""
