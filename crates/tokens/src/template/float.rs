//! Floats as Python writes them.

/// Python's `repr(float)`: the shortest digits that read back, with an exponent below 1e-4 and from
/// 1e16 on.
pub(super) fn repr(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf".to_owned() } else { "-inf".to_owned() };
    }
    let magnitude = number.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{number:e}");
        let Some((digits, exponent)) = text.split_once('e') else { return text };
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(e) => ('-', e),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = number.to_string();
    if text.contains('.') { text } else { text + ".0" }
}

#[cfg(test)]
mod tests {
    use super::repr;

    #[test]
    fn floats_read_as_python_writes_them() {
        for (number, text) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (9999999999999998.0, "9999999999999998.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e100, "1e+100"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(repr(number), text);
        }
    }
}
