/* Fuzzes `decode_jpeg_part`: damaged files, any parts, little memory. Built and run by jpeg_part.py.
 *
 * Usage: jpeg_part_fuzz SEED FIRST END SECONDS FILE...
 *
 * Number n of a seed is always the same damage to the same file, and the same part. A finding is said with its number,
 * and its file is kept as finding.jpg. Errors found by the sanitizers end the process. */

#include "jpeg_part.c"

#include <sanitizer/common_interface_defs.h>
#include <sanitizer/lsan_interface.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define MEMORY (64 << 20) /* bytes that the library may allocate for a part, and bytes of a whole image compared */
#define LEAKS_EVERY 20000 /* files from one look for leaks to the next */

struct file {
  unsigned char *data;
  size_t size;
};

static unsigned long long seed, number;
static uint64_t state;
static struct file tried;
static int64_t memory_left, allocations_left;

static uint64_t draw(uint64_t end) { /* below `end`; splitmix64 */
  uint64_t z = state += 0x9e3779b97f4a7c15;

  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return (z ^ z >> 31) % end;
}

/* The library's own functions that allocate (the linker's --wrap): they fail past the limit, or at a drawn call. */
void *__real_jpeg_get_small(j_common_ptr jpeg, size_t size);
void *__real_jpeg_get_large(j_common_ptr jpeg, size_t size);
static int is_refused(size_t size) { return (memory_left -= (int64_t)size) < 0 || --allocations_left == 0; }
void *__wrap_jpeg_get_small(j_common_ptr jpeg, size_t size) {
  return is_refused(size) ? NULL : __real_jpeg_get_small(jpeg, size);
}
void *__wrap_jpeg_get_large(j_common_ptr jpeg, size_t size) {
  return is_refused(size) ? NULL : __real_jpeg_get_large(jpeg, size);
}

static void keep_finding(void) {
  FILE *out = fopen("finding.jpg", "wb");

  fprintf(stderr, "Finding at seed %llu, number %llu; the file is finding.jpg.\n", seed, number);
  if (out != NULL) {
    fwrite(tried.data, 1, tried.size, out);
    fclose(out);
  }
}

static void fail(const char *what) {
  fprintf(stderr, "%s\n", what);
  keep_finding();
  _Exit(1);
}

/* Of its own: a warning that `jpeg_part.c` lets pass has to be noticed. */
static void refuse_damage(j_common_ptr jpeg, int level) {
  if (level < 0)
    longjmp(((struct handler *)jpeg->err)->failed, 1);
}

/* The whole image by the same library, or with `pixels` NULL only its size. 0: there was an error or a warning. */
static int decode_whole(unsigned *rows, unsigned *columns, J_COLOR_SPACE colors, unsigned char *pixels) {
  struct jpeg_decompress_struct jpeg;
  struct handler handler;

  memset(&jpeg, 0, sizeof jpeg);
  jpeg.err = jpeg_std_error(&handler.base);
  handler.base.error_exit = leave;
  handler.base.emit_message = refuse_damage;
  handler.base.output_message = say_nothing;
  if (setjmp(handler.failed)) {
    jpeg_destroy_decompress(&jpeg);
    return 0;
  }
  jpeg_create_decompress(&jpeg);
  jpeg_mem_src(&jpeg, tried.data, tried.size);
  jpeg_read_header(&jpeg, TRUE);
  *rows = jpeg.image_height;
  *columns = jpeg.image_width;
  if (pixels != NULL) {
    jpeg.out_color_space = colors;
    jpeg.dct_method = JDCT_ISLOW;
    jpeg_start_decompress(&jpeg);
    while (jpeg.output_scanline < jpeg.output_height) {
      unsigned char *line = pixels + (size_t)jpeg.output_scanline * jpeg.output_width * jpeg.output_components;
      jpeg_read_scanlines(&jpeg, &line, 1);
    }
    jpeg_finish_decompress(&jpeg);
  }
  jpeg_destroy_decompress(&jpeg);
  return 1;
}

/* A copy with some damage, in memory of its exact size; half of the damage is where headers are. */
static struct file damage(struct file from, struct file other) {
  size_t size = from.size, room = size + 16 * 64;
  unsigned char *data = malloc(room), *exact;

  memcpy(data, from.data, size);
  for (int left = draw(8) == 0 ? 0 : 1 << draw(4); left > 0; left--) {
    size_t at = draw(draw(2) && size > 700 ? 700 : size), count = 1 + draw(64), source = draw(other.size);
    size_t after = size - at;

    switch (draw(7)) {
    case 0: data[at] ^= 1 << draw(8); break;
    case 1: data[at] = draw(256); break;
    case 2: /* a marker, if it fits */
      data[at] = 0xff;
      data[at + (after > 1)] = 0xc0 + draw(64);
      break;
    case 3: /* some bytes are gone */
      count = count < after ? count : after - 1;
      memmove(data + at, data + at + count, after - count);
      size -= count;
      break;
    case 4: /* some are there twice */
      count = count < after ? count : after;
      memmove(data + at + count, data + at, after);
      size += count;
      break;
    case 5: /* some are of another file */
      count = count < other.size - source ? count : other.size - source;
      memcpy(data + at, other.data + source, count < after ? count : after);
      break;
    default: size = draw(8) == 0 ? at + 1 : size; /* the end is missing */
    }
  }
  exact = malloc(size);
  memcpy(exact, data, size);
  free(data);
  return (struct file){exact, size};
}

/* Whether the part was decoded; ends the process if it is not that of the whole image, or if that one has an error. */
static int try_part(void) {
  int channels = draw(3) ? 3 : 1, is_bgr = draw(2), is_decoded;
  J_COLOR_SPACE colors = channels == 1 ? JCS_GRAYSCALE : is_bgr ? JCS_EXT_BGR : JCS_EXT_RGB;
  unsigned rows = 1 + draw(99), columns = 1 + draw(99), place[3], top, left, height, width;

  allocations_left = 0;
  memory_left = INT64_MAX;
  decode_whole(&rows, &columns, colors, NULL);
  height = 1 + draw(draw(2) ? rows : 1 + rows / 8);
  width = 1 + draw(draw(2) ? columns : 1 + columns / 8);
  top = draw(4) ? draw(rows - height + 1) : rows - height;
  left = draw(4) ? draw(columns - width + 1) : columns - width;
  if (draw(32) == 0) { /* what no caller asks for */
    unsigned *numbers[] = {&rows, &columns, &top, &left, &height, &width};
    *numbers[draw(6)] = draw(2) ? draw(3) : draw(1ull << 32);
  }
  size_t capacity = ((size_t)height + 4) * ((size_t)width + 35) * channels;
  if (capacity > MEMORY || draw(32) == 0)
    capacity = draw(capacity < 1 << 20 ? capacity : 1 << 20);
  unsigned char *pixels = malloc(capacity), *whole = NULL;
  memory_left = MEMORY;
  allocations_left = draw(16) ? 0 : 1 + draw(40);
  is_decoded = decode_jpeg_part(tried.data, tried.size, rows, columns, top, left, height, width, channels, is_bgr,
                                pixels, capacity, place);
  memory_left = INT64_MAX;
  allocations_left = 0;
  if (is_decoded && (size_t)rows * columns * channels <= MEMORY) {
    whole = malloc((size_t)rows * columns * channels);
    if (!decode_whole(&rows, &columns, colors, whole))
      fail("An error was missed.");
    if (place[0] > top || place[1] > left || place[2] < left - place[1] + width)
      fail("The place is wrong.");
    for (size_t row = top; row < top + height; row++)
      if (memcmp(pixels + ((row - place[0]) * place[2] + left - place[1]) * channels,
                 whole + (row * columns + left) * channels, (size_t)width * channels) != 0)
        fail("Pixels differ.");
  }
  free(whole);
  free(pixels);
  return is_decoded;
}

static void say(FILE *out, unsigned long long files, unsigned long long decoded) {
  fprintf(out, "seed %llu: %llu files, %llu parts decoded and equal, no finding, %.0f CPU-seconds\n", seed, files,
          decoded, (double)clock() / CLOCKS_PER_SEC);
}

int main(int count, char **words) {
  struct file *files = calloc(count, sizeof *files);
  unsigned long long first = strtoull(words[2], NULL, 10), end = strtoull(words[3], NULL, 10), decoded = 0;
  double seconds = atof(words[4]);
  time_t begin = time(NULL), said = begin;

  seed = strtoull(words[1], NULL, 10);
  for (int i = 5; i < count; i++) {
    static unsigned char buffer[16 << 20];
    FILE *in = fopen(words[i], "rb");
    files[i].size = in == NULL ? 0 : fread(buffer, 1, sizeof buffer, in);
    if (files[i].size < 4 || fclose(in) != 0)
      return 2;
    files[i].data = memcpy(malloc(files[i].size), buffer, files[i].size);
  }
  __sanitizer_set_death_callback(keep_finding);
  for (number = first; number < end && time(NULL) - begin < seconds; number++) {
    state = seed;
    state = draw(UINT64_MAX) ^ number;
    tried = damage(files[5 + draw(count - 5)], files[5 + draw(count - 5)]);
    decoded += try_part();
    free(tried.data);
    tried.data = NULL;
    if ((number + 1 == end || number % LEAKS_EVERY == 0) && __lsan_do_recoverable_leak_check())
      fail("Memory was leaked by one of the numbers since the last look.");
    if (time(NULL) - said >= 60 && (said = time(NULL)) > 0)
      say(stderr, number - first, decoded);
  }
  if (__lsan_do_recoverable_leak_check())
    fail("Memory was leaked by one of the numbers since the last look.");
  say(stdout, number - first, decoded);
  for (int i = 5; i < count; i++)
    free(files[i].data);
  free(files);
  return 0;
}
