"""Parts of ``train_distributed.py``: training loops, checkpoints, and the processes of a job."""
