// Evaluated in the page by test_page.py: the faults of what is in view. Contrast is computed as WCAG 2
// does, against the nearest painted background.
() => {
  const controls = "button, input, select, textarea, a, svg[role=img]";
  const faults = [];
  const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if ((numbers(colour)[3] ?? 1) === 1) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const check = (node, colour, what) => {
    const [low, high] = [light(colour), light(background(node))].sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) faults.push(`contrast ${contrast.toFixed(2)}: ${what}`);
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    const text = texts.currentNode.textContent.trim();
    if (text && node.checkVisibility()) check(node, getComputedStyle(node).color, text);
  }
  for (const node of document.querySelectorAll(controls)) {
    const label = node.labels?.[0]?.textContent.trim();
    const name = node.getAttribute("aria-label") || node.textContent.trim() || label;
    if (!name) faults.push(`no name: ${node.outerHTML}`);
    if (node.placeholder) check(node, getComputedStyle(node, "::placeholder").color, node.placeholder);
  }
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) faults.push(`id twice: ${id}`);
  for (const name of ["aria-controls", "aria-labelledby", "aria-describedby", "for"])
    for (const node of document.querySelectorAll(`[${name}]`))
      if (!document.getElementById(node.getAttribute(name))) faults.push(`${name} leads nowhere`);
  return faults;
}
