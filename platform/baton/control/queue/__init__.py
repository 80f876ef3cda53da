"""Requests that wait for a replica, their order, and immediate rejections."""
