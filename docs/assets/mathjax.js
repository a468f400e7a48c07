window.MathJax = { tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] }, options: { ignoreHtmlClass: ".*", processHtmlClass: "arithmatex" } };
document$.subscribe(() => { MathJax.typesetPromise?.(); });
