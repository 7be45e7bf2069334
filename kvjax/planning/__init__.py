"""Plans what a model under a method needs and how fast it can be, before anything is run: `kvjax plan`."""
