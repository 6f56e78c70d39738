"""nn/attention"""
