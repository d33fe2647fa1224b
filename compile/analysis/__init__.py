"""What the compiler's output says: memory, copies, collectives, roofline, and estimates before a build."""
