"""HTTP towards clients: connections, errors, bodies."""
