//! The report: one page that needs nothing else, in light and dark, readable without colour.

use std::fmt::Write;

use pointsman_sim::replay::{
    ATTAINMENT, ITL_SLO, Misses, Served, TTFT_SLO_FIXED, TTFT_SLO_PREFILLS,
};

use super::svg::{Axis, Bar, KINDS, Line, bars, escaped, lines as chart, patterns};
use super::{About, Row, curves, words};

const STYLE: &str = include_str!("page.css");

/// The page.
pub(crate) fn page(about: &About, rows: &[Row]) -> String {
    let title = escaped(&about.title);
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>{title}</title><style>{STYLE}</style></head><body><main>\
         <h1>{title}</h1>{}<p class=\"small\">SLOs: TTFT at most {TTFT_SLO_FIXED} s and \
         {TTFT_SLO_PREFILLS} times the unloaded prefill of the whole prompt; mean ITL at most {:.0} ms. \
         Goodput is the highest speed of the trace at which {:.0} % of the requests meet both.</p>",
        patterns(),
        ITL_SLO * 1e3,
        ATTAINMENT * 100.0
    );
    html += &recommendation(about, rows);
    for trace in words::traces(rows) {
        html += &section(about, rows, trace);
    }
    html += &table(rows);
    html + "</main></body></html>\n"
}

fn recommendation(about: &About, rows: &[Row]) -> String {
    let Some(policy) = words::recommended(rows) else { return String::new() };
    // One policy alone is not recommended over any other.
    let chosen = rows.iter().any(|row| row.policy != policy);
    let heading = if chosen { "Recommendation" } else { "Result" };
    let mut html =
        format!("<section id=\"recommendation\"><h2>{heading}: {}</h2>", escaped(&policy));
    for sentence in words::sentences(rows, &policy) {
        let _ = write!(html, "<p>{}</p>", escaped(&sentence));
    }
    let lines = words::lines(about, &policy);
    if !about.keys.is_empty() {
        let _ = write!(html, "<p>In the configuration:</p><pre>{}</pre>", escaped(&lines));
    }
    html + "</section>"
}

fn section(about: &About, rows: &[Row], trace: &str) -> String {
    let drawn = drawn(rows, trace);
    let goodput = words::has_goodput(rows);
    let standings = words::standings(rows, trace);
    let mut html = format!("<section><h2>{}</h2>", escaped(trace));
    let (title, unit) = if goodput {
        ("Goodput, as a multiple of the recorded speed", "")
    } else {
        ("Requests within both SLOs", " %")
    };
    let bar = |standing: &words::Standing| {
        let told = if goodput { standing.score } else { standing.score * 100.0 };
        Bar {
            name: standing.policy.clone(),
            parts: vec![standing.score],
            told: format!("{told:.3}{unit}"),
        }
    };
    let list: Vec<Bar> = standings.iter().map(bar).collect();
    let _ = write!(
        html,
        "<figure><figcaption>{title}</figcaption>{}</figure>",
        bars(title, &[""], &list)
    );
    html += &misses(rows, trace, about.rate);
    let ttft = |served: &Served| served.ttft;
    let itl = |served: &Served| served.itl;
    html += &percentiles("TTFT", &drawn, ttft);
    html += &percentiles("Mean ITL of a request", &drawn, itl);
    html += &local(&drawn);
    if standings.len() > drawn.len() {
        let _ = write!(
            html,
            "<p class=\"small\">Curves: the {} best and always_remote.</p>",
            KINDS - 1
        );
    }
    html + "</section>"
}

/// The rows that curves are drawn of: those with requests, the best first, always_remote in any case.
fn drawn<'a>(rows: &'a [Row], trace: &str) -> Vec<&'a Row> {
    let of = |policy: &str| {
        rows.iter().find(|row| row.trace == trace && row.policy == policy && !row.served.is_empty())
    };
    let mut names: Vec<String> =
        words::standings(rows, trace).into_iter().map(|standing| standing.policy).collect();
    if let Some(at) =
        names.iter().position(|name| name == "always_remote").filter(|at| *at >= KINDS)
    {
        names.swap(at, KINDS - 1);
    }
    names.iter().take(KINDS).filter_map(|name| of(name)).collect()
}

fn percentiles(what: &str, rows: &[&Row], of: fn(&Served) -> Option<f64>) -> String {
    let line = |row: &&Row| Line {
        name: row.policy.clone(),
        points: curves::percentiles(&row.served, of),
    };
    let lines: Vec<Line> = rows.iter().map(line).collect();
    let values = lines.iter().flat_map(|line| line.points.iter().map(|point| point.1));
    let y = Axis::logarithmic(values);
    let title = format!("{what}, in ms, below which a share of the requests is");
    let svg = chart(&title, ("percent of requests", Axis::linear(0.0, 100.0)), ("ms", y), &lines);
    format!("<figure><figcaption>{title}</figcaption>{svg}</figure>")
}

fn local(rows: &[&Row]) -> String {
    let line = |row: &&Row| Line {
        name: row.policy.clone(),
        points: curves::local_over_time(&row.served),
    };
    let lines: Vec<Line> = rows.iter().map(line).collect();
    let last = lines.iter().flat_map(|line| line.points.last()).map(|point| point.0);
    let x = Axis::linear(0.0, last.fold(0.0, f64::max));
    let title = "Share of requests that went local, over time";
    let svg = chart(title, ("minutes", x), ("percent", Axis::linear(0.0, 100.0)), &lines);
    format!("<figure><figcaption>{title}</figcaption>{svg}</figure>")
}

fn misses(rows: &[Row], trace: &str, rate: f64) -> String {
    const PARTS: [&str; 5] = ["TTFT, remote", "TTFT, local", "ITL, remote", "ITL, local", "failed"];
    let bar = |standing: &words::Standing| {
        let own = |row: &&Row| row.trace == trace && row.policy == standing.policy;
        let own: Vec<&Row> = rows.iter().filter(own).collect();
        let sum = |of: fn(&Misses) -> usize| {
            own.iter().map(|row| of(&row.summary.misses)).sum::<usize>() as f64
                / own.len().max(1) as f64
        };
        let parts = vec![
            sum(|misses| misses.ttft_remote),
            sum(|misses| misses.ttft_local),
            sum(|misses| misses.itl_remote),
            sum(|misses| misses.itl_local),
            sum(|misses| misses.failed),
        ];
        let told = format!("{:.0}", parts.iter().sum::<f64>());
        Bar { name: standing.policy.clone(), parts, told }
    };
    let list: Vec<Bar> = words::standings(rows, trace).iter().map(bar).collect();
    let title =
        format!("Requests that missed an SLO at rate {rate}, by what they missed and by path");
    format!("<figure><figcaption>{title}</figcaption>{}</figure>", bars(&title, &PARTS, &list))
}

fn table(rows: &[Row]) -> String {
    let mut html =
        "<section><h2>All figures</h2><div class=\"scroll\"><table><thead><tr>".to_owned();
    let heads = super::table::HEAD;
    for head in heads {
        let _ = write!(html, "<th scope=\"col\">{head}</th>");
    }
    html += "</tr></thead><tbody>";
    for row in rows {
        html += "<tr>";
        for cell in super::table::cells(row) {
            let _ = write!(html, "<td>{}</td>", escaped(&cell));
        }
        html += "</tr>";
    }
    html + "</tbody></table></div></section>"
}
