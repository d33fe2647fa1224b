"""The compilation manager: lowers, compiles in worker processes, checks and stores every executable of a grid."""
