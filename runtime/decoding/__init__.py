"""From a prompt to tokens: the engine and the strategies it drives."""
