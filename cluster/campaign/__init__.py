"""A campaign: its loop, and how it is started, resumed, stopped and published."""
