"""Models that answer, local or behind a server, behind one interface (`model.ChatModel`)."""
