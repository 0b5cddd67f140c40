"""A process with a role: owns the arena, glues scheduler, engine, transport and channels together."""
