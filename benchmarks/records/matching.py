"""Which rows of two files of records measure the same."""
import dataclasses

from benchmarks.records.significance import What


def together(old: dict[What, list], new: dict[What, list], force: bool) -> list[tuple[What, What]]:
    """Which rows of the two files measure the same. Raises ValueError where they differ in what must not.

    Of every case that both hold, the GPU, the shape and the dtype must agree; with `force` they need not, as long as
    it is clear which row is which.
    """
    ignored = _differing_fields(old, new, force)

    def by_key(side: dict[What, list]) -> dict[tuple, What]:
        """The rows by what is not ignored of them."""
        rows = {}
        for where in side:
            fields = dataclasses.asdict(where)
            rows[tuple(value for name, value in fields.items() if name not in ignored)] = where
        return rows

    old_rows, new_rows = by_key(old), by_key(new)
    if len(old_rows) < len(old) or len(new_rows) < len(new):
        raise ValueError("--force: a file holds several rows that would count as the same; give files of one each")
    pairs = [(old_rows[key], where) for key, where in new_rows.items() if key in old_rows]
    if not pairs:
        raise ValueError("no row of the one is in the other: steps, shapes, dtypes and ways of launching must agree")
    return pairs


def _differing_fields(old: dict[What, list], new: dict[What, list], force: bool) -> set[str]:
    """The fields in which the two files' rows differ as a whole. Raises ValueError where they must not."""
    old_cases, new_cases = {where.case for where in old}, {where.case for where in new}
    common = old_cases & new_cases
    if not common:
        if not force or max(len(old_cases), len(new_cases)) > 1:
            raise ValueError(_differs("step", old_cases, new_cases, force))
        return {"case", "gpu", "shape", "dtype"}
    ignored = set()
    for name in ("gpu", "shape", "dtype"):
        for case in sorted(common):
            of_old = {getattr(where, name) for where in old if where.case == case}
            of_new = {getattr(where, name) for where in new if where.case == case}
            if of_old & of_new:
                continue
            if not force:
                raise ValueError(_differs(f"{name} of {case}", of_old, of_new, force))
            ignored.add(name)
    return ignored


def _differs(name: str, old: set[str], new: set[str], force: bool) -> str:
    def some(side: set[str]) -> str:
        more = ["..."] if len(side) > 3 else []
        return "; ".join([*sorted(side)[:3], *more])

    fix = "--force compares them all the same"
    if force or len(old) > 1 or len(new) > 1:
        fix = "even --force can't tell which goes with which"
    return f"{name} differs: {some(old)} in the old, {some(new)} in the new; {fix}"
