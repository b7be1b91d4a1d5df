"""The campaign as a state machine and its parts: no Ray, no SQL, no clock."""
