/** Builds elements. Text comes in as text nodes only, so that no name can become markup. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * Builds an element: `h("a", { href: "#curves", class: "tab", onclick: open }, "Curves")`.
 * Attributes: `style` is an object of properties, `on…` are listeners, true sets an empty attribute; null and
 * false leave the attribute away. Children: nodes, strings, numbers, lists of them; null and false are left away.
 */
export function h(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** Builds an SVG element, as `h` does. */
export function svg(tag, attributes, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) setAttribute(node, name, value);
  append(node, children);
  return node;
}

/** Sets one attribute by the rules of `h`. */
export function setAttribute(node, name, value) {
  if (name === "style" && value) {
    for (const [property, to] of Object.entries(value)) node.style.setProperty(property, to);
  } else if (name.startsWith("on") && typeof value === "function") {
    node.addEventListener(name.slice(2), value);
  } else if (value === null || value === undefined || value === false) {
    node.removeAttribute(name);
  } else {
    const text = value === true ? "" : String(value);
    if (node.getAttribute(name) !== text) node.setAttribute(name, text);
  }
}

function append(node, children) {
  for (const child of children) {
    if (Array.isArray(child)) append(node, child);
    else if (child instanceof Node) node.appendChild(child);
    else if (child !== null && child !== undefined && child !== false) node.appendChild(document.createTextNode(String(child)));
  }
}

/** Replaces what is in a node. */
export function fill(node, ...children) {
  node.textContent = "";
  append(node, children);
  return node;
}

/** Sets a node's text; leaves the node alone where it has that text already. */
export function setText(node, text) {
  const next = String(text ?? "");
  if (node.textContent !== next) node.textContent = next;
  return node;
}

/** True where a key press belongs to a field in which people write. */
export function isTyping(target) {
  return target instanceof Element && target.closest("input, textarea, select, [contenteditable]") !== null;
}
