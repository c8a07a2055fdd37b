/** Names and directions of the figures by which models are judged, as the run's documents describe them. */

/** The figure of this name among `figures`, a list or an object by name; one without a direction where it is not there. */
export function findFigure(figures, name) {
  const found = Array.isArray(figures) ? figures.find((each) => each.name === name) : figures != null && Object.hasOwn(figures, name) ? figures[name] : undefined;
  return found ?? { name, label: name, title: name, direction: "", better: null, nominal: null };
}
