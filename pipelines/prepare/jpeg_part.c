/* Decodes a part of a JPEG file: the rows and columns that a crop keeps.
 *
 * libjpeg-turbo (https://libjpeg-turbo.org, libjpeg.txt: "Partial image decompression") transforms the columns of a
 * region alone (jpeg_crop_scanline), and reads through rows without transforming them (jpeg_skip_scanlines). Huffman
 * decoding takes place for all of the file, so an error anywhere in it is found as by decoding the whole image.
 *
 * Only files are decoded here for which the pixels are those of the whole image, bit for bit; for any other, and for
 * one with any error or warning, the caller decodes the whole image, which says what is wrong. Built as a library
 * without Python's headers, called by `pipelines.prepare.decoded_part`. */

#include <setjmp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or newer is needed"
#endif

/* Rows read at a time: as many as a row of blocks has. */
#define ROWS 16
/* Pixels around the part that are decoded, too: from subsampled chroma a pixel is interpolated with its neighbours. */
#define MARGIN 2

/* What the library takes for the handler of its errors, `base`, and where to go on after one. */
struct handler {
  struct jpeg_error_mgr base;
  jmp_buf failed;
};

static void leave(j_common_ptr jpeg) { longjmp(((struct handler *)jpeg->err)->failed, 1); }

/* A warning (level -1) is an error; traces (level 0 and above) say nothing. */
static void leave_if_damaged(j_common_ptr jpeg, int level) {
  if (level < 0)
    leave(jpeg);
}

static void say_nothing(j_common_ptr jpeg) { (void)jpeg; }

/* Whether cropping gives the bits of the whole image: one scan of Huffman codes, 8 bits, grey or YCbCr with a usual
 * subsampling. What has several scans is decoded before the first row is read, so there is little to gain. */
static int is_usual(j_decompress_ptr jpeg) {
  const jpeg_component_info *parts = jpeg->comp_info;

  if (jpeg->data_precision != 8 || jpeg->arith_code || jpeg->progressive_mode || jpeg_has_multiple_scans(jpeg))
    return 0;
  if (jpeg->num_components == 1)
    return jpeg->jpeg_color_space == JCS_GRAYSCALE;
  if (jpeg->num_components != 3 || jpeg->jpeg_color_space != JCS_YCbCr)
    return 0;
  for (int i = 1; i < 3; i++)
    if (parts[i].h_samp_factor != 1 || parts[i].v_samp_factor != 1)
      return 0;
  switch (parts[0].h_samp_factor * 10 + parts[0].v_samp_factor) {
  case 11: /* 4:4:4 */
  case 21: /* 4:2:2 */
  case 12: /* 4:4:0 */
  case 22: /* 4:2:0 */
  case 41: /* 4:1:1 */
    return 1;
  default:
    return 0;
  }
}

static int skip(j_decompress_ptr jpeg, JDIMENSION rows) { return rows == 0 || jpeg_skip_scanlines(jpeg, rows) == rows; }

/* Decodes the part of `height` x `width` pixels that begins at (`top`, `left`), and some pixels around it.
 *
 * data, size: the file.
 * rows, columns: of the image, as the caller knows them; the part lies in it.
 * is_bgr: whether the order of three channels is blue, green, red; else red, green, blue.
 * channels: 3, or 1 for grey.
 * pixels, capacity: bytes that may be written. What is decoded has at most 4 rows and 35 columns more than the part.
 * place: the first row and column of the image that are in `pixels`, and how many columns there are to a row.
 *
 * Returns 1 if the part was decoded; 0 if the whole image has to be, and `pixels` holds nothing of use. */
int decode_jpeg_part(const unsigned char *data, size_t size, unsigned rows, unsigned columns, unsigned top,
                     unsigned left, unsigned height, unsigned width, int channels, int is_bgr, unsigned char *pixels,
                     size_t capacity, unsigned *place) {
  struct jpeg_decompress_struct jpeg;
  struct handler handler;

  memset(&jpeg, 0, sizeof jpeg);
  jpeg.err = jpeg_std_error(&handler.base);
  handler.base.error_exit = leave;
  handler.base.emit_message = leave_if_damaged;
  handler.base.output_message = say_nothing;
  if (setjmp(handler.failed)) {
    jpeg_destroy_decompress(&jpeg);
    return 0;
  }
  jpeg_create_decompress(&jpeg);
  jpeg_mem_src(&jpeg, (unsigned char *)data, size);
  jpeg_read_header(&jpeg, TRUE);
  if (jpeg.image_height != rows || jpeg.image_width != columns || height == 0 || width == 0 || height > rows ||
      width > columns || top > rows - height || left > columns - width || !is_usual(&jpeg))
    leave((j_common_ptr)&jpeg);
  jpeg.out_color_space = channels == 1 ? JCS_GRAYSCALE : is_bgr ? JCS_EXT_BGR : JCS_EXT_RGB;
  jpeg.dct_method = JDCT_ISLOW;
  jpeg_start_decompress(&jpeg);

  JDIMENSION margin = jpeg.max_h_samp_factor > 1 || jpeg.max_v_samp_factor > 1 ? MARGIN : 0;
  JDIMENSION first_row = top < margin ? 0 : top - margin, first_column = left < margin ? 0 : left - margin;
  JDIMENSION end_row = rows - top - height < margin ? rows : top + height + margin;
  JDIMENSION row_width = (columns - left - width < margin ? columns : left + width + margin) - first_column;
  unsigned char *lines[ROWS];

  jpeg_crop_scanline(&jpeg, &first_column, &row_width); /* begins with a block, further left */
  size_t line_bytes = (size_t)row_width * channels;
  if (jpeg.output_components != channels || capacity / line_bytes < end_row - first_row ||
      !skip(&jpeg, first_row))
    leave((j_common_ptr)&jpeg);
  while (jpeg.output_scanline < end_row) {
    JDIMENSION count = end_row - jpeg.output_scanline;

    count = count < ROWS ? count : ROWS;
    for (JDIMENSION i = 0; i < count; i++)
      lines[i] = pixels + (jpeg.output_scanline - first_row + i) * line_bytes;
    if (jpeg_read_scanlines(&jpeg, lines, count) == 0)
      leave((j_common_ptr)&jpeg);
  }
  /* Skipping up to the end would leave out what is there: errors are found on the way to the last row, and in it. */
  if (end_row < rows) {
    lines[0] = jpeg.mem->alloc_large((j_common_ptr)&jpeg, JPOOL_IMAGE, line_bytes);
    if (!skip(&jpeg, rows - 1 - end_row) || jpeg_read_scanlines(&jpeg, lines, 1) != 1)
      leave((j_common_ptr)&jpeg);
  }
  jpeg_finish_decompress(&jpeg);
  jpeg_destroy_decompress(&jpeg);
  place[0] = first_row;
  place[1] = first_column;
  place[2] = row_width;
  return 1;
}
