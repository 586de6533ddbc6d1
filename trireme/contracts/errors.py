"""What is raised about a message that breaks the contract."""


class ContractError(ValueError):
    """A message is not what the contract says. The text starts with the field at fault."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
