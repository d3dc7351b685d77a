"""What parts measure with: settings, shapes, steps, copies, timing."""
