"""A recipe for data that nobody has seen before: `confide init` looks at them, chooses, and says why."""
