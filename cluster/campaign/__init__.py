"""A campaign: its file, its loop, and how it is started, resumed, stopped and published."""
