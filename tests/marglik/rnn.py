"""A recurrent network of images, which the backend does not cover."""

from torch import Tensor, nn


class RowLSTM(nn.Module):
    """Reads an 8×8 image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 4, batch_first=True)
        self.fc = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 8, 8) as logits (N, 10)."""
        return self.fc(self.rnn(x[:, 0])[0][:, -1])
