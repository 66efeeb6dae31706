"""Tools of other programs for chats, and the model for other programs, by the Model Context Protocol."""
