"""Which produced files go back."""

from policies.artifacts import ArtifactLimits, Produced, Selection, output_path, select

MIB = 1 << 20


def file(name: str, size: int = 1) -> Produced:
    return Produced(f"/testbed/output/{name}", size)


def test_files_within_the_limits_all_go_back_in_their_order() -> None:
    files = [file("b"), file("a", 0), file("c", MIB)]
    assert select(files, ArtifactLimits()) == Selection(tuple(files), ())


def test_the_answer_file_is_no_file() -> None:
    files = [file("answer.txt"), Produced("/testbed/answer.txt", 1), file("sub/answer.txt")]
    assert select(files, ArtifactLimits()) == Selection((file("sub/answer.txt"),), ())


def test_one_that_is_too_large_is_left_out_and_the_rest_goes_back() -> None:
    limits = ArtifactLimits(max_file_mib=1)
    files = [file("a", MIB), file("b", MIB + 1), file("c", 1)]
    assert select(files, limits) == Selection((files[0], files[2]), (files[1],))


def test_together_they_stay_within_the_total() -> None:
    limits = ArtifactLimits(max_file_mib=2, max_total_mib=3)
    files = [file("a", 2 * MIB), file("b", 2 * MIB), file("c", MIB), file("d", 1), file("e", 0)]
    assert select(files, limits) == Selection((files[0], files[2], files[4]), (files[1], files[3]))


def test_beyond_their_number_they_are_left_out() -> None:
    files = [file(str(number)) for number in range(5)]
    assert select(files, ArtifactLimits(max_files=2)) == Selection(
        tuple(files[:2]), tuple(files[2:])
    )
    assert select(files, ArtifactLimits(max_files=0)) == Selection((), tuple(files))


def test_the_answer_file_takes_no_room() -> None:
    limits = ArtifactLimits(max_files=1, max_total_mib=1)
    files = [file("answer.txt", MIB), file("b", MIB)]
    assert select(files, limits) == Selection((files[1],), ())


def test_a_listed_name_lies_in_the_output_directory() -> None:
    assert output_path("sub/a b.csv") == "/testbed/output/sub/a b.csv"
