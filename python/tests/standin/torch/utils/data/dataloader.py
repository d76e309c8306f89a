import subprocess
import sys


class _Worker:
    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        self.pid = self.process.pid

    def is_alive(self):
        return self.process.poll() is None

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


class _BaseDataLoaderIter:
    pass


class _MultiProcessingDataLoaderIter(_BaseDataLoaderIter):
    def __init__(self, loader):
        self._workers = [_Worker() for _ in range(loader.num_workers)]
        self._task_info = {0: (loader.make(),)}

    def __iter__(self):
        return self

    def __next__(self):
        return self._task_info[0][0]

    def _shutdown_workers(self):
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def __del__(self):
        self._shutdown_workers()


class DataLoader:
    def __init__(self, make, num_workers=1, persistent_workers=False):
        self.make, self.num_workers, self.persistent_workers = make, num_workers, persistent_workers
        self._iterator = None

    def __iter__(self):
        iterator = _MultiProcessingDataLoaderIter(self)
        if self.persistent_workers:
            self._iterator = iterator
        return iterator
