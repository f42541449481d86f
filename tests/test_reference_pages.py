"""The reference pages of the manual are what the code says."""

from docs.generate import HERE, generate


def test_each_reference_page_is_what_the_code_generates() -> None:
    for path, text in generate().items():
        assert path.read_text(encoding="utf-8") == text, "run `make docs`"


def test_folder_of_reference_pages_has_no_other_page() -> None:
    assert set(HERE.glob("*.md")) == set(generate())
