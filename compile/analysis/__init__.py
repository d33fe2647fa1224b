"""Analysis of executables: memory plans, copies, collectives and times."""
