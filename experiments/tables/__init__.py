"""What makes the tables that ship with kvjax."""
