"""Models of questions: recognized, traced and cached."""
