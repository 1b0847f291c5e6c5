"""Chat models, local or on a server, with one interface (`model.ChatModel`)."""
