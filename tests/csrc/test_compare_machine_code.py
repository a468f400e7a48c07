"""tools/compare_machine_code.py: which kernels of two builds count as equal, and its refusals."""

from processes import script


def test_names_do_not_count_but_code_does():
    old = {"kept": "MOV", "renamed": "ADD", "changed": "MUL", "removed": "SUB"}
    new = {"kept": "MOV", "new_name": "ADD", "changed": "FMA", "added": "DIV"}
    equal, different, only_old, only_new = script("tools/compare_machine_code.py").compare(old, new)
    assert sorted(equal) == [("kept", "kept"), ("renamed", "new_name")]
    assert different == [("changed", "changed")]
    assert only_old == ["removed"] and only_new == ["added"]


def test_exit_status(monkeypatch, capsys):
    compare_machine_code = script("tools/compare_machine_code.py")
    builds = {"a.so": {"k": "MOV"}, "b.so": {"k": "ADD"}, "none.so": {}}
    monkeypatch.setattr(compare_machine_code, "kernels", builds.__getitem__)
    assert compare_machine_code.main(["a.so", "a.so"]) == 0
    assert compare_machine_code.main(["a.so", "b.so"]) == 1 and "1 different" in capsys.readouterr().out
    assert compare_machine_code.main(["none.so", "none.so"]) == 1  # nothing was compared

    monkeypatch.setattr(compare_machine_code, "kernels", open)  # FileNotFoundError, as where there is no cuobjdump
    assert compare_machine_code.main(["a.so", "b.so"]) == 2 and capsys.readouterr().err.count("\n") == 1
