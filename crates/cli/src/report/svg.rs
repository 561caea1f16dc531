//! Charts as inline SVG. Colours come from the page's style sheet; what a line or a bar is can be
//! told without them, by dashes, marks, patterns and words.

use std::fmt::Write;

/// Size of a chart.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 44.0;

/// Kinds of lines and of bar fills that can be told apart.
pub(super) const KINDS: usize = 6;

const DASHES: [&str; KINDS] = ["none", "8 4", "2 3", "12 4 2 4", "5 3 1 3", "1 5"];

/// Ticks of one axis at most.
const MAX_TICKS: usize = 8;

/// Marks along one line.
const MARKS: usize = 6;

/// A line: its name and its points, by x.
pub(super) struct Line {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

/// How values become places.
#[derive(Clone, Copy)]
pub(super) struct Axis {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) logarithmic: bool,
}

impl Axis {
    /// From the lowest to the highest of these, both above zero.
    pub(super) fn logarithmic(values: impl Iterator<Item = f64>) -> Axis {
        let (mut low, mut high) = (f64::INFINITY, 0.0_f64);
        for value in values.filter(|value| *value > 0.0) {
            (low, high) = (low.min(value), high.max(value));
        }
        if low > high {
            (low, high) = (1.0, 10.0);
        }
        // Bounds are among the ticks.
        let below = ticks_around(low).rfind(|tick| *tick <= low * 1.001).unwrap_or(low);
        let above = ticks_around(high).find(|tick| *tick >= high * 0.999).unwrap_or(high);
        Axis { low: below, high: above.max(below * 2.0), logarithmic: true }
    }

    pub(super) fn linear(low: f64, high: f64) -> Axis {
        Axis { low, high: if high > low { high } else { low + 1.0 }, logarithmic: false }
    }

    /// From 0 to 1 along the axis.
    fn share(&self, value: f64) -> f64 {
        let share = if self.logarithmic {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        share.clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<f64> {
        if self.logarithmic {
            let decades = (self.low.log10().floor() as i32)..=(self.high.log10().ceil() as i32);
            let within = |tick: &f64| *tick >= self.low * 0.999 && *tick <= self.high * 1.001;
            let all: Vec<f64> = decades.clone().flat_map(decade).filter(within).collect();
            // Over many decades only the powers of ten.
            let powers = || decades.map(|power| 10f64.powi(power)).filter(within).collect();
            return if all.len() <= MAX_TICKS { all } else { powers() };
        }
        let raw = (self.high - self.low) / 5.0;
        let decade = 10f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|s| s * decade).find(|s| *s >= raw);
        let step = step.unwrap_or(raw);
        let count = ((self.high - self.low) / step + 1e-9).floor() as usize;
        (0..=count).map(|at| self.low + at as f64 * step).collect()
    }
}

/// 1, 2 and 5 times a power of ten.
fn decade(power: i32) -> impl Iterator<Item = f64> {
    [1.0, 2.0, 5.0].into_iter().map(move |step| step * 10f64.powi(power))
}

/// The ticks of a logarithmic axis from below a value to above it.
fn ticks_around(value: f64) -> impl DoubleEndedIterator<Item = f64> {
    let power = value.log10().floor() as i32;
    (power - 1..=power + 1).flat_map(|power| decade(power).collect::<Vec<_>>())
}

/// A number as an axis shows it.
fn shown(value: f64) -> String {
    let text = if value.abs() >= 1000.0 {
        return format!("{:.0}k", value / 1000.0);
    } else if value.abs() >= 10.0 || value == 0.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.2}")
    };
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// Text that means nothing to a browser but itself.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn open(title: &str, height: f64) -> String {
    let title = escaped(title);
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\">\
         <title>{title}</title>"
    )
}

/// Lines over axes, with a legend below.
pub(super) fn lines(title: &str, x: (&str, Axis), y: (&str, Axis), lines: &[Line]) -> String {
    let (inner, tall) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
    let px = |value: f64| LEFT + x.1.share(value) * inner;
    let py = |value: f64| TOP + (1.0 - y.1.share(value)) * tall;
    let mut svg = open(title, HEIGHT);
    for tick in y.1.ticks() {
        let (at, text) = (py(tick), shown(tick));
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text class=\"end\" x=\"{:.1}\" y=\"{:.1}\">{text}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 4.0
        );
    }
    for tick in x.1.ticks() {
        let _ = write!(
            svg,
            "<text class=\"middle\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            px(tick),
            HEIGHT - BOTTOM + 16.0,
            shown(tick)
        );
    }
    let _ = write!(
        svg,
        "<text class=\"middle\" x=\"{:.1}\" y=\"{:.1}\">{}</text>\
         <text class=\"middle\" transform=\"translate(14 {:.1}) rotate(-90)\">{}</text>",
        LEFT + inner / 2.0,
        HEIGHT - 8.0,
        escaped(x.0),
        TOP + tall / 2.0,
        escaped(y.0)
    );
    for (kind, line) in lines.iter().enumerate() {
        let points: Vec<(f64, f64)> = line.points.iter().map(|&(a, b)| (px(a), py(b))).collect();
        svg += &curve(kind % KINDS, &points);
    }
    svg += "</svg>";
    svg += &legend(lines);
    svg
}

fn curve(kind: usize, points: &[(f64, f64)]) -> String {
    let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let mut svg = format!(
        "<polyline class=\"line k{kind}\" stroke-dasharray=\"{}\" points=\"{}\"/>",
        DASHES[kind],
        path.join(" ")
    );
    // Marks of different lines are not at the same places.
    let stride = (points.len() / MARKS).max(1);
    for (x, y) in points.iter().skip((kind * stride / KINDS) % stride.max(1)).step_by(stride) {
        svg += &mark(kind, *x, *y);
    }
    svg
}

fn mark(kind: usize, x: f64, y: f64) -> String {
    let shape = match kind {
        0 => "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        1 => "M-3.5 -3.5h7v7h-7z",
        2 => "M0 -4.5l4.5 8h-9z",
        3 => "M0 -5l5 5l-5 5l-5 -5z",
        4 => "M-4 -4l8 8M-4 4l8 -8",
        _ => "M0 -5v10M-5 0h10",
    };
    format!("<path class=\"mark k{kind}\" transform=\"translate({x:.1} {y:.1})\" d=\"{shape}\"/>")
}

fn legend(lines: &[Line]) -> String {
    let mut html = "<ul class=\"legend\">".to_owned();
    for (at, line) in lines.iter().enumerate() {
        let kind = at % KINDS;
        let _ = write!(
            html,
            "<li><svg viewBox=\"0 0 44 12\" class=\"key\" aria-hidden=\"true\">\
             <polyline class=\"line k{kind}\" stroke-dasharray=\"{}\" points=\"0,6 44,6\"/>{}</svg>{}</li>",
            DASHES[kind],
            mark(kind, 22.0, 6.0),
            escaped(&line.name)
        );
    }
    html + "</ul>"
}

/// A bar: its name, the sizes of its parts, and what is written behind it.
pub(super) struct Bar {
    pub(super) name: String,
    pub(super) parts: Vec<f64>,
    pub(super) told: String,
}

/// Bars to the right, one below the other; parts are told apart by patterns.
pub(super) fn bars(title: &str, parts: &[&str], bars: &[Bar]) -> String {
    const ROW: f64 = 26.0;
    const NAMES: f64 = 230.0;
    const TOLD: f64 = 120.0;
    let most = bars.iter().map(|bar| bar.parts.iter().sum::<f64>()).fold(1e-9, f64::max);
    let mut svg = open(title, bars.len() as f64 * ROW + 8.0);
    for (row, bar) in bars.iter().enumerate() {
        let y = row as f64 * ROW + 4.0;
        let _ = write!(
            svg,
            "<text class=\"end\" x=\"{}\" y=\"{:.1}\">{}</text>",
            NAMES - 8.0,
            y + 15.0,
            escaped(&bar.name)
        );
        let mut x = NAMES;
        for (kind, size) in bar.parts.iter().enumerate() {
            let width = size / most * (WIDTH - NAMES - TOLD);
            let _ = write!(
                svg,
                "<rect class=\"bar\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"20\" \
                 fill=\"url(#p{})\"/>",
                kind % KINDS
            );
            x += width;
        }
        let _ = write!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            x + 6.0,
            y + 15.0,
            escaped(&bar.told)
        );
    }
    svg += "</svg>";
    if parts.len() > 1 {
        svg += "<ul class=\"legend\">";
        for (kind, name) in parts.iter().enumerate() {
            let _ = write!(
                svg,
                "<li><svg viewBox=\"0 0 22 12\" class=\"key\" aria-hidden=\"true\"><rect class=\"bar\" \
                 width=\"22\" height=\"12\" fill=\"url(#p{})\"/></svg>{}</li>",
                kind % KINDS,
                escaped(name)
            );
        }
        svg += "</ul>";
    }
    svg
}

/// The patterns that bars are filled with, once a page.
pub(super) fn patterns() -> String {
    let drawn = [
        "<rect width=\"8\" height=\"8\" class=\"f0\"/>",
        "<path d=\"M0 8L8 0M-2 2L2 -2M6 10L10 6\" class=\"s1\"/>",
        "<circle cx=\"4\" cy=\"4\" r=\"1.8\" class=\"f2\"/>",
        "<path d=\"M0 0L8 8M6 -2L10 2M-2 6L2 10\" class=\"s3\"/>",
        "<path d=\"M0 4H8\" class=\"s4\"/>",
        "<path d=\"M4 0V8M0 4H8\" class=\"s5\"/>",
    ];
    let mut svg =
        "<svg width=\"0\" height=\"0\" class=\"hidden\" aria-hidden=\"true\"><defs>".to_owned();
    for (kind, shape) in drawn.iter().enumerate() {
        let _ = write!(
            svg,
            "<pattern id=\"p{kind}\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\">{shape}</pattern>"
        );
    }
    svg + "</defs></svg>"
}
