"""What runs it: this machine, its clock, its peaks and their limit, compiler, engine, and graphs that replay."""
