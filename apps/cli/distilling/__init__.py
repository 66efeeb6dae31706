"""What `edgeinfer distill` makes, one module each; each has `add_parser(commands)` and imports torch when it runs."""
