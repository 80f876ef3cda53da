"""A live web page that shows what the fleet is doing."""
