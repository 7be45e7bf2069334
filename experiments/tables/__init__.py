"""Scripts that make the tables that ship with kvjax."""
