"""Staged copies, on CPU: what goes in comes out, addresses stay, a buffer is not written while its copy may run."""

import numpy as np
import torch

from models.staging import Download, Upload

CPU = torch.device("cpu")


def test_arrays_arrive_at_one_address_through_alternating_buffers() -> None:
    upload = Upload(64, CPU)
    address = upload.device.data_ptr()
    places = []
    for count in (1, 8, 3):
        numbers = np.arange(count) + count
        places.append(upload.begin())
        found = upload.numbers(numbers)
        assert found.data_ptr() == address
        np.testing.assert_array_equal(found.numpy(), numbers)
    assert places == [0, 1, 0]


def test_only_what_is_used_is_copied() -> None:
    upload = Upload(64, CPU)
    upload.device.fill_(7)
    upload.hosts[upload.begin()][:] = 1
    upload.send(5)
    assert upload.device.tolist() == [1] * 5 + [7] * 59


def test_a_buffer_whose_copy_runs_is_waited_for() -> None:
    class Event:
        def __init__(self) -> None:
            self.landed, self.waits = True, 0

        def query(self) -> bool:
            return self.landed

        def synchronize(self) -> None:
            self.waits += 1

        def record(self) -> None:
            self.landed = False

    upload = Upload(16, CPU)
    events = [Event(), Event()]
    upload._copied = events  # type: ignore[assignment]
    for _ in range(2):
        upload.numbers(np.zeros(1, np.int64))
    assert [event.waits for event in events] == [0, 0], "two buffers: nothing to wait for yet"
    upload.numbers(np.zeros(1, np.int64))
    assert [event.waits for event in events] == [1, 0]
    events[1].landed = True
    upload.numbers(np.zeros(1, np.int64))
    assert [event.waits for event in events] == [1, 0], "it had landed"


def test_downloads_are_whole_arrays_of_words() -> None:
    download = Download(8, CPU)
    drawn = torch.tensor([2**40 + 1, -3])
    words = download.fetch(drawn.view(torch.int32))
    assert words.view(np.int64).tolist() == drawn.tolist()
