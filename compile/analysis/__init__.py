"""Analysis of executables: memory plans, copies, collectives, the roofline, and estimates before a build."""
