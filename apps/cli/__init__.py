"""The `edgeinfer` command, one file per subcommand; knows nothing of kernels."""
