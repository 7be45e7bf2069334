"""The small trained model that ships with kvjax: its vocabulary, tasks, training and measurement."""
